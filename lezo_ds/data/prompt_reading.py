"""Prompts are read before answers are written: what they share once, and their own parts unpadded.

A copy is a direction of a probe. Its prompts begin with the same n tokens (instructions,
demonstrations), which it reads once. It reads the own parts of its prompts next to each other in
one row, or in a few, and a mask keeps them apart. Then each prompt gets a row of keys and values:

    common    <s> c  c                    one row for each copy
    own       a1 b1 b2 b3                 one row or a few for each copy; a1 does not see b1 b2 b3
    cache     <s> c  c  -  -  a1          one row for each prompt; the mask hides the columns "-"
              <s> c  c  b1 b2 b3

The last token of each prompt stays unread. The model reads it to write the first token.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from lezo_ds.data.packing import can_pack, padding_alone, place_evenly, seen_tokens
from lezo_ds.forward.answer_cache import cache_name, kinds_of_layers


def can_read_apart(model: Any, num_tokens: int) -> bool:
    """Return whether `read_prompts` does not change what the model writes.

    Elsewhere distances may count the padding: in sliding windows, or in biases of attention.
    """
    rotates = getattr(model.config.get_text_config(), "rope_parameters", None) is not None
    keeps_all = kinds_of_layers(model.config) == {DynamicLayer}
    return rotates and keeps_all and can_pack(model.config, num_tokens)


@torch.no_grad()
def read_prompts(
    model: Any, common_ids: Tensor, input_ids: Tensor, attention_mask: Tensor, cache: Cache
) -> dict[str, Any]:
    """Read all tokens of prompts but the last ones; return inputs that go on from the cache.

    On ranks that share a model, this is a collective of two forward passes.

    Args:
        model: for which `can_read_apart`.
        common_ids: int64 [copies, n].
        input_ids: int64 [copies * prompts, width], padded on the left.
        attention_mask: likewise.
        cache: an empty cache, which is filled.
    """
    num_copies, num_common = common_ids.shape
    device = input_ids.device
    read = DynamicCache(config=model.config)
    into_cache = {cache_name(model): read, "use_cache": True, "logits_to_keep": 1}
    model(input_ids=common_ids, **into_cache)

    own_lengths = (attention_mask.sum(dim=1) - num_common - 1).tolist()
    layout = _lay_out(input_ids.cpu(), own_lengths, num_copies, num_common)
    read.batch_repeat_interleave(len(layout.own_ids) // num_copies)
    model(
        input_ids=layout.own_ids.to(device),
        position_ids=layout.position_ids.to(device),
        attention_mask=layout.own_mask.to(device),
        **into_cache,
    )
    rows = layout.rows.to(device)
    columns = layout.columns.to(device)
    for index, layer in enumerate(read.layers):
        keys = layer.keys[rows, :, columns].transpose(1, 2)  # [prompts, heads, width - 1, size]
        values = layer.values[rows, :, columns].transpose(1, 2)
        cache.update(keys, values, index)
    common = common_ids.repeat_interleave(len(input_ids) // num_copies, dim=0)
    return {
        "input_ids": torch.cat([common, input_ids[:, num_common:]], dim=1),
        "attention_mask": layout.attention_mask.to(device),
    }


class _Layout(NamedTuple):
    """Where the own parts of prompts are, of W tokens at most in a row.

    Attributes:
        own_ids: int64 [shared rows, W].
        position_ids: likewise.
        own_mask: bool [shared rows, 1, W, n + W], which tokens each token sees.
        rows: int64 [prompts, 1], the shared row of each prompt.
        columns: int64 [prompts, width - 1], where the tokens of each prompt are among the n common
            ones and the W after them. Any column stands for padding.
        attention_mask: int64 [prompts, width], 0 at padding.
    """

    own_ids: Tensor
    position_ids: Tensor
    own_mask: Tensor
    rows: Tensor
    columns: Tensor
    attention_mask: Tensor


def _lay_out(
    input_ids: Tensor, own_lengths: Sequence[int], num_copies: int, num_common: int
) -> _Layout:
    num_prompts, width = input_ids.shape
    num_shared, rows, offsets = place_evenly(own_lengths, num_copies)
    # One column more, because a row of no tokens cannot run.
    own_width = 1 + max(map(operator.add, offsets, own_lengths))
    own_ids = torch.zeros(num_shared, own_width, dtype=torch.int64)
    positions = torch.zeros_like(own_ids)
    owner = padding_alone(num_shared, own_width)
    columns = torch.zeros(num_prompts, width - 1, dtype=torch.int64)
    columns[:, :num_common] = torch.arange(num_common)
    attention_mask = torch.ones_like(input_ids)
    for prompt, length in enumerate(own_lengths):
        row = rows[prompt]
        first = width - 1 - length  # in the padded row; the last token is not read here
        place = slice(offsets[prompt], offsets[prompt] + length)
        own_ids[row, place] = input_ids[prompt, first:-1]
        positions[row, place] = torch.arange(num_common, num_common + length)
        owner[row, place] = prompt
        columns[prompt, first:] = num_common + torch.arange(place.start, place.stop)
        attention_mask[prompt, num_common:first] = 0
    sees_own = seen_tokens(owner)
    sees_common = sees_own.new_ones(num_shared, own_width, num_common)
    own_mask = torch.cat([sees_common, sees_own], dim=2)[:, None]
    return _Layout(
        own_ids, positions, own_mask, torch.tensor(rows)[:, None], columns, attention_mask
    )
