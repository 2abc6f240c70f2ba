"""Prompts are read before answers are written: what they share once, and their own parts unpadded.

A copy is a direction of a probe. Its prompts begin with the same n tokens (instructions,
demonstrations), which it reads once. It reads the own parts of its prompts next to each other in
one row, or in a few, and a mask keeps them apart. Then each prompt gets a row of keys and values:

    common    <s> c  c                    one row for each copy
    own       a1 b1 b2 b3                 num_shared rows for each copy; a1 does not see b1 b2 b3
    cache     <s> c  c  -  -  a1          one row for each prompt; the mask hides the columns "-"
              <s> c  c  b1 b2 b3

The last token of each prompt stays unread. The model reads it to write the first token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from lezo_ds.data.packing import can_pack

_MOST_SHARED = 512
"""About as many tokens share a row. More would take longer to keep apart than to pad."""


def can_read_apart(model: Any, num_tokens: int) -> bool:
    """Return whether `read_prompts` does not change what the model writes.

    Elsewhere distances may count the padding: in sliding windows, or in biases of attention.
    """
    rotates = getattr(model.config.get_text_config(), "rope_parameters", None) is not None
    kinds_of_layers = {type(layer) for layer in DynamicCache(config=model.config).layers}
    return rotates and kinds_of_layers == {DynamicLayer} and can_pack(model.config, num_tokens)


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
    num_rows, width = input_ids.shape
    device = input_ids.device
    read = DynamicCache(config=model.config)
    model(input_ids=common_ids, past_key_values=read, use_cache=True, logits_to_keep=1)

    own_lengths = (attention_mask.sum(dim=1) - num_common - 1).tolist()
    num_shared, shared_rows, offsets = _place(own_lengths, num_copies)
    own_width = max(1, *(sum(pair) for pair in zip(offsets, own_lengths, strict=True)))
    own_ids = input_ids.new_zeros(num_copies * num_shared, own_width)
    positions = torch.zeros_like(own_ids)
    # A row of the mask that hides every token could give NaN, so each token of padding is a prompt
    # of its own, with a negative number.
    owner = torch.arange(-own_width, 0, device=device).repeat(len(own_ids), 1)
    columns = torch.zeros(num_rows, width - 1, dtype=torch.int64, device=device)
    columns[:, :num_common] = torch.arange(num_common)
    is_visible = torch.ones_like(attention_mask)
    for row, (shared, offset, length) in enumerate(
        zip(shared_rows, offsets, own_lengths, strict=True)
    ):
        place = slice(offset, offset + length)
        first = width - 1 - length
        own_ids[shared, place] = input_ids[row, first:-1]
        positions[shared, place] = torch.arange(num_common, num_common + length)
        owner[shared, place] = row
        columns[row, first:] = num_common + torch.arange(offset, offset + length)
        is_visible[row, num_common:first] = 0

    same_owner = (owner[:, :, None] == owner[:, None, :]).tril()
    sees_common = same_owner.new_ones(len(own_ids), own_width, num_common)
    read.batch_repeat_interleave(num_shared)
    model(
        input_ids=own_ids,
        position_ids=positions,
        attention_mask=torch.cat([sees_common, same_owner], dim=2)[:, None],
        past_key_values=read,
        use_cache=True,
        logits_to_keep=1,
    )
    rows = torch.tensor(shared_rows, device=device)[:, None]
    for index, layer in enumerate(read.layers):
        keys = layer.keys[rows, :, columns].transpose(1, 2)  # [rows, heads, width - 1, head width]
        values = layer.values[rows, :, columns].transpose(1, 2)
        cache.update(keys, values, index)
    common = common_ids.repeat_interleave(num_rows // num_copies, dim=0)
    return {
        "input_ids": torch.cat([common, input_ids[:, num_common:]], dim=1),
        "attention_mask": is_visible,
    }


def _place(lengths: list[int], num_copies: int) -> tuple[int, list[int], list[int]]:
    """Return the number of shared rows of a copy, and the shared row and offset of each own part.

    The longest part comes first. Each is put into the row of its copy that is filled least.
    """
    num_prompts = len(lengths) // num_copies
    firsts = range(0, len(lengths), num_prompts)
    totals = [sum(lengths[first : first + num_prompts]) for first in firsts]
    num_shared = max(1, math.ceil(max(totals) / max(_MOST_SHARED, *lengths)))
    filled = [0] * (num_copies * num_shared)
    rows = [0] * len(lengths)
    offsets = [0] * len(lengths)
    for part in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        first = part // num_prompts * num_shared
        row = min(range(first, first + num_shared), key=filled.__getitem__)
        rows[part] = row
        offsets[part] = filled[row]
        filled[row] += lengths[part]
    return num_shared, rows, offsets
