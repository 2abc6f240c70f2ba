"""Copies of a batch, one for each probe: the share of some of them, and one run for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from lezo_ds.errors import UserError


def has_batch(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether any tensor is that of the batch, and not the same for all sequences."""
    leaves = tree_leaves((list(args), dict(kwargs)))
    return any(isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[0] > 1 for leaf in leaves)


def share_of(rows: int, total: int, first: int, num_copies: int) -> Callable[[Any], Any]:
    """Return the function that takes some of `total` copies of a tensor [copies x rows (x tokens), ...].

    A tensor that is the same for all sequences, such as [1, tokens] position ids, is expanded to the rows of
    a single copy, for models that index it by row. One dimension may be a batch or its tokens: refused.
    """
    all_rows = total * rows

    def share(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        length, *others = value.shape
        if others and length == 1:
            return value.expand(rows, *others) if num_copies == 1 else value
        if others and length % all_rows == 0:
            size = length // total
            return value[first * size : (first + num_copies) * size]
        what = f"a module gets a tensor {tuple(value.shape)} without a batch dimension of {all_rows} rows"
        raise UserError(what, fix="set zo.probes_per_pass=1 for this model")

    return share


def run_once(
    run: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    rows: int,
    total: int,
    layer: int | None,
) -> Any:
    """Run a block on one of `total` equal copies of a batch; return what it gives for all of them.

    The keys and values of `layer` in a cache are of all copies, before and after; None if no cache is read.
    """
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    layers = caches[0].layers[layer : layer + 1] if caches and layer is not None else []
    if layer is not None and not {*map(type, layers)} & {DynamicLayer, DynamicSlidingWindowLayer}:
        return run(*args, **kwargs)  # the state may be more than keys and values

    def of_one(value: Any) -> Any:
        is_batch = (
            isinstance(value, Tensor) and value.dim() > 1 and len(value) % (rows * total) == 0
        )
        return value[: len(value) // total] if is_batch else value

    for cached in layers:
        cached.batch_select_indices(torch.arange(rows))
    output = run(*mapped(of_one, args), **mapped(of_one, kwargs))
    for cached in layers:
        cached.batch_select_indices(torch.arange(rows, device=cached.device).repeat(total))
    return tree_map(
        lambda value: torch.cat([value] * total) if isinstance(value, Tensor) else value, output
    )


def mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """Return arguments, or keyword arguments, with `function` called on each tensor in them."""
    # Nearly all are tensors. One tree_map would take a fifth of the host's time of a step.
    if isinstance(values, Mapping):
        return dict(zip(values, mapped(function, values.values()), strict=True))
    return [function(v) if isinstance(v, Tensor) else tree_map(function, v) for v in values]
