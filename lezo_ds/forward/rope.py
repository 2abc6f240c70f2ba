"""Rotary positions whose frequencies depend on the length of a text: longrope and dynamic NTK.

transformers (5.23) takes the frequencies of the longest row for all rows of a batch. Here each row
has those that it would have alone, so that a text's logits do not depend on its neighbors:

    row 0   12 tokens   short frequencies
    row 1   90 tokens   long frequencies, because the model's limit is 64 tokens
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lezo_ds.forward.batch import MicroBatch, Tensors
from lezo_ds.sharding.files import sections_of


def rope_limit(config: Any) -> int | None:
    """Return the most tokens of a text that a model reads with its first frequencies.

    Args:
        config: the model's configuration, of transformers.

    Returns:
        None if the frequencies are the same for all lengths.
    """
    decoder = config.get_text_config(decoder=True)
    parameters = getattr(decoder, "rope_parameters", None) or {}
    limits = []
    # Some models have parameters for each kind of layers.
    for section in sections_of(parameters):
        kind = section.get("rope_type") or ""
        if kind == "longrope":
            limits.append(section["original_max_position_embeddings"])
        elif "dynamic" in kind:
            limits.append(decoder.max_position_embeddings)
    return min(limits, default=None)


def rotate_each_row(model: Any) -> None:
    """Let the rotary modules of a model choose the frequencies of each row by its own length."""
    limit = rope_limit(model.config)
    if limit is None:
        return
    for module in model.modules():
        if hasattr(module, "rope_type"):
            module.forward = _by_row(module.forward, limit)


def _by_row(own_forward: Callable[..., Any], limit: int) -> Callable[..., Any]:
    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return cosines and sines, each [rows, tokens, width], of position ids [rows, tokens]."""
        is_long = position_ids.amax(dim=-1) >= limit
        if is_long.dim() != 1 or is_long.all() or not is_long.any():
            return own_forward(x, position_ids, *args, **kwargs)
        short_ids = position_ids.clamp(max=limit - 1)
        of_short = own_forward(x, short_ids, *args, **kwargs)
        of_long = own_forward(x, position_ids, *args, **kwargs)
        rows = is_long[:, None, None]
        tables = zip(of_long, of_short, strict=True)
        return tuple(torch.where(rows, long, short) for long, short in tables)

    return forward


def own_positions(batch: MicroBatch) -> Tensors:
    """Return the inputs of a batch that is padded on the right, with position ids for each row.

    The padding after the last logits that a row selects has the position of its last token, so that
    it does not count for the row's length.
    """
    selection = batch.selection
    if selection is None or "position_ids" in batch.inputs:
        return batch.inputs
    num_rows, width = batch.inputs["input_ids"].shape
    last = selection.positions.new_zeros(num_rows)
    last.scatter_reduce_(0, selection.rows, selection.positions, "amax")
    columns = torch.arange(width, device=last.device)
    position_ids = torch.minimum(columns, last[:, None])
    return {**batch.inputs, "position_ids": position_ids}


def may_outgrow(model: Any, attention_mask: Tensor, num_new_tokens: int) -> bool:
    """Return whether an answer may pass the limit of the frequencies that its prompt has.

    The keys of the prompt have other frequencies then, so they cannot stay in a cache.

    Args:
        model: a causal language model.
        attention_mask: int64 [prompts, width], 0 at padding.
        num_new_tokens: most tokens of an answer.
    """
    limit = rope_limit(model.config)
    if limit is None:
        return False
    lengths = attention_mask.sum(dim=1)
    begins_short = lengths <= limit
    may_end_long = lengths + num_new_tokens > limit
    return bool((begins_short & may_end_long).any())
