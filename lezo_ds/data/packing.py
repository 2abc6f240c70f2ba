"""Packing: several sequences share a row, so that other examples take the place of padding.

Position ids tell the model where each sequence begins, and a mask hides the other sequences of the row.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from lezo_ds.forward.batch import MicroBatch

_WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")
_MIXERS = ("alibi", "mamba", "ssm", "conv", "linear", "recurrent")
"""Words in config keys of models that locate or mix tokens by other means than position ids and attention."""

FEWEST_DEALT = 4
"""Deal at least this many examples to a micro-batch. Two or three of different lengths rarely share a row."""

_MAX_ROWS = 0.75
"""Pack only if at most this share of the rows is left: a [W, W] mask takes memory that padding does not."""


def can_pack(config: Any, max_length: int) -> bool:
    """Return whether position ids and a mask are enough to keep the sequences of a row apart.

    No attention window may be shorter than a sequence: our mask replaces the model's, which would apply it.
    """
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    values = config.to_dict()
    if any(word in key and value for key, value in values.items() for word in _MIXERS):
        return False
    # Only SDPA accepts an arbitrary 4-D mask; transformers has no public name for either attribute.
    takes_masks = model._supports_sdpa and config._attn_implementation in (None, "sdpa")
    windows = [values[key] for key in _WINDOWS if values.get(key) is not None]
    return bool(takes_masks and all(window >= max_length for window in windows))


def pack(batch: MicroBatch) -> MicroBatch:
    """Lay out the rows of a batch, padded on the right to W, in as few rows of this width as they need.

    "attention_mask" is bool [R, 1, W, W]. Tokens after the last selected logits of a sequence are dropped.
    """
    if batch.selection is None:
        return batch
    tokens, selection = batch.inputs["input_ids"], batch.selection
    num_sequences, width = tokens.shape
    lengths = torch.zeros(num_sequences, dtype=torch.int64)
    lengths.scatter_reduce_(0, selection.rows, selection.positions + 1, "amax")
    rows, offsets = _first_fit(lengths.tolist(), width)
    num_rows = max(rows) + 1
    if num_rows > _MAX_ROWS * num_sequences:
        return batch
    packed = torch.zeros(num_rows, width, dtype=torch.int64)
    positions = torch.zeros_like(packed)
    # A row of the mask that hides every token could give NaN, so each token of padding is its own owner.
    owner = torch.arange(-width, 0).repeat(num_rows, 1)
    for sequence, (row, offset, length) in enumerate(
        zip(rows, offsets, lengths.tolist(), strict=True)
    ):
        place = slice(offset, offset + length)
        packed[row, place] = tokens[sequence, :length]
        positions[row, place] = torch.arange(length)
        owner[row, place] = sequence
    mask = (owner[:, :, None] == owner[:, None, :]).tril()[:, None]
    moved = replace(
        selection,
        rows=torch.tensor(rows)[selection.rows],
        positions=selection.positions + torch.tensor(offsets)[selection.rows],
    )
    inputs = {"input_ids": packed, "position_ids": positions, "attention_mask": mask}
    return replace(batch, inputs=inputs, selection=moved)


def deal(rows: np.ndarray, num_micro_batches: int) -> np.ndarray:
    """Deal examples, sorted by length, to micro-batches that have about the same number of tokens.

    Ranks run different micro-batches and then wait for each other.

    >>> deal(np.array([10, 11, 12, 13, 14, 15]), 2).tolist()
    [15, 12, 11, 14, 13, 10]
    """
    rounds = rows[::-1].reshape(-1, num_micro_batches).copy()
    rounds[1::2] = rounds[1::2, ::-1]  # back and forth, as the first of a round gets the longest
    return rounds.T.reshape(-1)


def _first_fit(lengths: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    """Return the row and the offset of each sequence: the longest first, each in the first row with room."""
    rows, offsets = [0] * len(lengths), [0] * len(lengths)
    filled: list[int] = []
    for sequence in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[sequence]
        row = next((row for row, used in enumerate(filled) if used + length <= width), len(filled))
        if row == len(filled):
            filled.append(0)
        rows[sequence], offsets[sequence] = row, filled[row]
        filled[row] += length
    return rows, offsets
