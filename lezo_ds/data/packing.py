"""Packing: several sequences share a row, so that other examples take the place of padding.

Position ids tell the model where each sequence begins, and a mask hides the other sequences of a
row. Three sequences A, B and C become two rows of W = 6 tokens:

    input_ids        A0 A1 A2 A3 A4  .        position_ids    0  1  2  3  4  0
                     B0 B1 B2 C0 C1  .                        0  1  2  0  1  0

    attention_mask   bool [rows, 1, W, W]: token i sees token j. Of the second row:

                     j   B0 B1 B2 C0 C1  .
                i  B0     x
                   B1     x  x
                   B2     x  x  x
                   C0              x
                   C1              x  x
                    .                    x    padding sees itself only

The selected logits are moved with their tokens. They have the bits that they would have alone in a
row: masked keys add exactly 0.

The candidates of an example have once what they begin with. Sequences that all begin with the same
n tokens (instructions, a system prompt) may have these once in each row. Here, n = 2, and C and D
begin with the tokens S0 S1:

    input_ids        S0 S1 C2 C3 D2  .        position_ids    0  1  2  3  2  0

                     j   S0 S1 C2 C3 D2  .
                i  S0     x
                   S1     x  x
                   C2     x  x  x
                   C3     x  x  x  x
                   D2     x  x        x
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from lezo_ds.data.batches import PAD_MULTIPLE
from lezo_ds.forward.answer_cache import DummyLayer, begins_after_padding, kinds_of_layers
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.forward.rope import rope_limit

_WINDOWS = ("sliding_window", "window_size", "attention_chunk_size", "floor_scale")
"""Keys of a model's config that limit how far attention looks back, in tokens, or after how many
tokens of a row it gets sharper."""
_MIXERS = ("alibi", "mamba", "ssm", "conv", "linear", "recurrent")
"""Words in the keys of models that locate or mix tokens without position ids and attention."""
_ATTENTION_LAYERS = {DynamicLayer, DynamicSlidingWindowLayer, DummyLayer}
"""What transformers caches of layers that attend to tokens, or reuse another layer's keys."""

FEWEST_DEALT = 4
"""Deal at least this many examples to a micro-batch: two or three long ones rarely share a row."""

_MOST_TOKENS = 0.9
"""Pack only if at most this part of the tokens is left: wider rows take longer in attention."""

_ROW_TOKENS = 512
"""About as many own tokens share a row. In narrower rows, more is padding; in wider ones, attention
takes longer. With 512, packed batches of SST-2 and BoolQ need 3 to 11 % more products than their
tokens alone in a model of width 2,048, and 8 to 22 % more in one of width 576."""

_START = -(2**62)
"""The owner of the tokens with which all sequences of a row begin."""


def can_pack(config: Any, max_length: int) -> bool:
    """Return whether position ids and a mask are enough to keep the sequences of a row apart.

    Args:
        config: the model's configuration, of transformers.
        max_length: tokens of the longest sequence. No attention window may be shorter: our mask
            replaces the one with which the model would apply the window.
    """
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    model = model or MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    if model is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    if begins_after_padding(config):
        return False
    # Of a model for images and text, the config of the text model has these keys.
    decoder = config.get_text_config(decoder=True)
    for key, value in decoder.to_dict().items():
        if value and any(word in key for word in _MIXERS):
            return False
        if key in _WINDOWS and value is not None and value < max_length:
            return False
    if not _attends_everywhere(decoder):
        return False
    # A row has the rotary frequencies of its longest sequence.
    limit = rope_limit(config)
    if limit is not None and limit < max_length:
        return False
    # Only SDPA accepts an arbitrary 4-D mask. transformers (5.23) has no public name for these two.
    return bool(model._supports_sdpa and config._attn_implementation in (None, "sdpa"))


def _attends_everywhere(decoder: Any) -> bool:
    """Return whether all layers of a text model mix tokens by attention that a mask limits."""
    try:
        return kinds_of_layers(decoder) <= _ATTENTION_LAYERS
    except (AttributeError, ValueError):  # transformers makes no such cache for the model
        return False


def pack(batch: MicroBatch, num_start: int = 0) -> MicroBatch:
    """Lay out the rows of a batch, padded on the right to W, in fewer rows.

    Tokens after the last selected logits of a sequence are dropped. The batch stays as it is if it
    selects no logits, or if too many tokens would be left.

    Args:
        batch: a sequence in each row. What all sequences of an example begin with is there once.
        num_start: number of tokens with which all sequences begin, before any selected logits.
            Each row has them once.
    """
    if batch.selection is None:
        return batch
    tokens = batch.inputs["input_ids"]  # [sequences, W]
    selection = batch.selection
    num_sequences = len(tokens)
    lengths = torch.zeros(num_sequences, dtype=torch.int64)
    lengths.scatter_reduce_(0, selection.rows, selection.positions + 1, "amax")
    example_of = torch.arange(num_sequences)
    if batch.token_examples is not None:
        example_of = batch.token_examples[:, 0]
    layout = _lay_out(tokens, lengths, example_of, num_start)
    num_rows = int(layout.rows.max()) + 1
    if num_rows * layout.width > _MOST_TOKENS * tokens.numel():
        return batch
    # Of each token of a sequence: its place, and what it sees.
    position = torch.arange(tokens.shape[1]).expand_as(tokens)
    is_start = position < num_start
    is_shared = position < layout.num_shared[:, None]
    offset = torch.where(is_shared, layout.shared_offsets[:, None], layout.own_offsets[:, None])
    column = torch.where(is_start, position, position + offset)
    sequence = torch.arange(num_sequences)[:, None].expand_as(tokens)
    example = example_of[:, None].expand_as(tokens)
    context = num_sequences + example
    owner = torch.where(is_shared, context, sequence).masked_fill(is_start, _START)

    is_kept = position < lengths[:, None]
    places = (layout.rows[sequence[is_kept]], column[is_kept])
    alone = padding_alone(num_rows, layout.width)
    zeros = torch.zeros_like(alone)

    def placed(values: Tensor, padding: Tensor) -> Tensor:
        return padding.index_put(places, values[is_kept])

    inputs = {
        "input_ids": placed(tokens, zeros),
        "position_ids": placed(position, zeros),
        "attention_mask": seen_tokens(placed(owner, alone), placed(context, alone))[:, None],
    }
    moved = replace(
        selection,
        rows=layout.rows[selection.rows],
        positions=column[selection.rows, selection.positions],
    )
    return replace(
        batch,
        inputs=inputs,
        selection=moved,
        token_examples=placed(example, zeros),  # padding counts as that of any example
    )


class _Layout(NamedTuple):
    """Where the tokens of S sequences are, in rows of W tokens.

    Attributes:
        width: W.
        rows: int64 [S].
        num_shared: int64 [S], how many tokens are there once for all sequences of an example.
        shared_offsets: int64 [S], the column of the first of these tokens, if it had the position
            0.
        own_offsets: likewise, of the tokens after them.
    """

    width: int
    rows: Tensor
    num_shared: Tensor
    shared_offsets: Tensor
    own_offsets: Tensor


def _lay_out(tokens: Tensor, lengths: Tensor, example_of: Tensor, num_start: int) -> _Layout:
    num_shared = torch.full_like(lengths, num_start)
    own_starts = torch.zeros_like(lengths)  # of own tokens, among those of the example
    totals = []
    for example in range(int(example_of.max()) + 1):
        sequences = (example_of == example).nonzero()[:, 0]
        shared = num_start
        if len(sequences) > 1:
            together = tokens[sequences, : int(lengths[sequences].min())]
            is_alike = (together == together[0]).all(dim=0)
            shared = max(num_start, int(is_alike.cumprod(dim=0).sum()))
        own_lengths = lengths[sequences] - shared
        num_shared[sequences] = shared
        own_starts[sequences] = shared - num_start + own_lengths.cumsum(dim=0) - own_lengths
        totals.append(shared - num_start + int(own_lengths.sum()))
    _, rows, offsets = place_evenly(totals)
    longest = num_start + max(map(operator.add, offsets, totals))
    width = -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE
    shared_offsets = torch.tensor(offsets)[example_of]
    own_offsets = num_start + shared_offsets + own_starts - num_shared
    return _Layout(width, torch.tensor(rows)[example_of], num_shared, shared_offsets, own_offsets)


def padding_alone(num_rows: int, width: int) -> Tensor:
    """Return the owners of the tokens of rows that have only padding: int64 [rows, W].

    A row of a mask that hides every token could give NaN, so each token of padding is a sequence of
    its own, with a negative number. Sequences are written over it, with numbers from 0 on.
    """
    return torch.arange(-width, 0).repeat(num_rows, 1)


def seen_tokens(owner: Tensor, context: Tensor | None = None) -> Tensor:
    """Return whether token i sees token j: bool [rows, W, W].

    Args:
        owner: int64 [rows, W], the number of the sequence that each token belongs to, or of the
            context of several.
        context: likewise, the number of the context that its sequence has.
    """
    is_seen = owner[:, :, None] == owner[:, None, :]
    is_seen |= (owner == _START)[:, None, :]
    if context is not None:
        is_seen |= context[:, :, None] == owner[:, None, :]
    return is_seen.tril()


def place_evenly(lengths: Sequence[int], num_copies: int = 1) -> tuple[int, list[int], list[int]]:
    """Return the number of shared rows, and the row and the offset of each sequence.

    The longest one comes first. Each is put into the row of its copy that is filled least.

    Args:
        lengths: of the sequences, those of one copy after those of another.
        num_copies: sequences of different copies share no row.
    """
    num_sequences = len(lengths) // num_copies
    firsts = range(0, len(lengths), num_sequences)
    totals = [sum(lengths[first : first + num_sequences]) for first in firsts]
    of_a_copy = max(1, math.ceil(max(totals) / max(_ROW_TOKENS, *lengths)))
    filled = [0] * (num_copies * of_a_copy)
    rows = [0] * len(lengths)
    offsets = [0] * len(lengths)
    for sequence in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        first = sequence // num_sequences * of_a_copy
        row = min(range(first, first + of_a_copy), key=filled.__getitem__)
        rows[sequence] = row
        offsets[sequence] = filled[row]
        filled[row] += lengths[sequence]
    return len(filled), rows, offsets


def deal(rows: np.ndarray, num_micro_batches: int) -> np.ndarray:
    """Deal examples, sorted by length, to micro-batches that have about the same number of tokens.

    Ranks run different micro-batches and then wait for each other. The examples are dealt like
    cards, the longest first, back and forth. The result lists micro-batch after micro-batch.

    >>> deal(np.array([10, 11, 12, 13, 14, 15]), 2).tolist()
    [15, 12, 11, 14, 13, 10]
    """
    longest_first = rows[::-1]
    rounds = longest_first.reshape(-1, num_micro_batches).copy()  # [rounds, micro-batches]
    rounds[1::2] = rounds[1::2, ::-1]  # back and forth, as the first of a round gets the longest
    return rounds.T.reshape(-1)
