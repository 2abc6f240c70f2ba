"""Several sequences in a row: what would be padding holds other examples.

A model that is told where each begins, and lets no token see another sequence's, computes for each what it
would compute for it alone, up to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from lezo_ds.model.batch import LogitSelection, MicroBatch

_WINDOWS = ("sliding_window", "window_size", "attention_chunk_size")
_MIXERS = ("alibi", "mamba", "ssm", "conv", "linear", "recurrent")
"""In a config's keys: what tells tokens apart, or mixes them, by other means than positions and attention."""

_MOST_ROWS = 0.75  # of those before


def can_pack(config: Any, max_length: int) -> bool:  # noqa: ANN401
    """Return whether a model keeps sequences of a row apart when their positions and a mask say so.

    Its attention takes any mask, nothing else mixes tokens, and no window of its own, for which the mask
    stands in, is shorter than a sequence.

    Args:
        config: of a causal language model of transformers.
        max_length: of a sequence, in tokens.
    """
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    values = config.to_dict()
    if any(word in key and value for key, value in values.items() for word in _MIXERS):
        return False
    takes_masks = model._supports_sdpa and config._attn_implementation in (None, "sdpa")
    windows = [values[key] for key in _WINDOWS if values.get(key) is not None]
    return bool(takes_masks and all(window >= max_length for window in windows))


def pack(batch: MicroBatch) -> MicroBatch:
    """Lay the sequences of a micro-batch out in as few rows of the same width as they need.

    Of each sequence only the tokens up to the last whose logits are wanted are kept.

    Args:
        batch: of S rows padded on the right [S, W], of which some logits are wanted.

    Returns:
        The batch as it is if that spares less than a quarter of the rows, which may take less memory than a
        mask does. Else the same logits, in the same order, of R rows: "input_ids" and "position_ids" int64
        [R, W], "attention_mask" bool [R, 1, W, W], true where a token is seen.
    """
    if batch.selection is None:
        return batch
    tokens, selection = batch.inputs["input_ids"], batch.selection
    num_sequences, width = tokens.shape
    lengths = torch.zeros(num_sequences, dtype=torch.int64)
    lengths.scatter_reduce_(0, selection.rows, selection.positions + 1, "amax")
    rows, offsets = _first_fit(lengths.tolist(), width)
    num_rows = max(rows) + 1
    if num_rows > _MOST_ROWS * num_sequences:
        return batch
    packed = torch.zeros(num_rows, width, dtype=torch.int64)
    positions = torch.zeros_like(packed)
    owner = torch.arange(-width, 0).repeat(num_rows, 1)  # a token of padding sees itself only
    for sequence, (row, offset, length) in enumerate(zip(rows, offsets, lengths.tolist(), strict=True)):
        place = slice(offset, offset + length)
        packed[row, place] = tokens[sequence, :length]
        positions[row, place] = torch.arange(length)
        owner[row, place] = sequence
    inputs = {"input_ids": packed, "position_ids": positions, "attention_mask": _mask(owner)}
    return replace(batch, inputs=inputs, selection=_moved(selection, rows, offsets))


def _first_fit(lengths: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    """Return (row, offset) of each sequence: the longest first, each in the first row with room for it.

    >>> _first_fit([3, 5, 2, 4], width=6)
    ([2, 0, 1, 1], [0, 0, 4, 0])
    """
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


def _mask(owner: Tensor) -> Tensor:
    same = owner[:, :, None] == owner[:, None, :]
    return same.tril()[:, None]


def _moved(selection: LogitSelection, rows: Sequence[int], offsets: Sequence[int]) -> LogitSelection:
    positions = selection.positions + torch.tensor(offsets)[selection.rows]
    return replace(selection, rows=torch.tensor(rows)[selection.rows], positions=positions)
