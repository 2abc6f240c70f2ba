"""Copies of a batch, one for each probe: cutting out some of them, and one run for all of them.

Tensors of a pass have the rows of all copies, one copy after the other: [copies * rows, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from lezo_ds.errors import UserError
from lezo_ds.forward.answer_cache import RoomyLayer

Forward = Callable[..., Any]
"""The forward method of a module."""
Args = Sequence[Any]
"""Its positional arguments."""
Kwargs = Mapping[str, Any]
"""Its arguments by name."""

_LAYERS_OF_KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer, RoomyLayer)


def has_batch(args: Args, kwargs: Kwargs) -> bool:
    """Return whether any tensor has rows of the batch, and is not the same for all of them."""
    leaves = tree_leaves((list(args), dict(kwargs)))
    return any(isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[0] > 1 for leaf in leaves)


def probe_slice(
    rows: int, tokens: int, total: int, first: int, num_copies: int
) -> Callable[[Any], Any]:
    """Return the function that takes the copies [first, first + num_copies) from a value.

    Args:
        rows: number of rows of one copy.
        tokens: number of tokens of a row.
        total: number of copies in the tensor.
        first: index of the first copy to take.
        num_copies: how many copies to take.

    A tensor [total * rows, ...] or [total * rows * tokens, ...] is cut. A tensor [1, ...] that all
    rows share, such as position ids, is expanded to the rows of a single copy, for models that
    index it by row. Values that are no tensors, and scalars, stay as they are. A vector is refused:
    its only dimension may be the rows or their tokens. So is a tensor of any other length: a
    mixture may have the tokens once for each expert, [experts * total * rows * tokens, ...].
    """
    all_rows = total * rows

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        length, *others = value.shape
        if others and length == 1:
            return value.expand(rows, *others) if num_copies == 1 else value
        if others and length in (all_rows, all_rows * tokens):
            size = length // total
            return value[first * size : (first + num_copies) * size]
        raise UserError(
            f"a module gets a tensor {tuple(value.shape)} without a batch dimension of "
            f"{all_rows} rows",
            fix="set zo.probes_per_pass=1 for this model",
        )

    return take


def run_once(
    run: Forward,
    args: Args,
    kwargs: Kwargs,
    rows: int,
    total: int,
    cache_layer: int | None,
) -> Any:
    """Run a block on one of `total` equal copies of a batch; return its output for all of them.

    Args:
        run: the forward method of the block.
        args: its inputs for all copies: tensors [total * rows, ...], or [1, ...] for all rows.
        kwargs: likewise.
        rows: number of rows of one copy.
        total: number of copies.
        cache_layer: index of the layer of a key-value cache that the block reads and extends; None
            if it has no cache. The cache has the rows of all copies, before and after.
    """
    layers: Sequence[Any] = ()
    if cache_layer is not None:
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        if caches:
            layers = caches[0].layers[cache_layer : cache_layer + 1]
        if not layers or type(layers[0]) not in _LAYERS_OF_KEYS_AND_VALUES:
            return run(*args, **kwargs)  # the state may be more than keys and values

    def first_copy(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > 1 and len(value) % (rows * total) == 0:
            return value[: len(value) // total]
        return value

    def all_copies(value: Any) -> Any:
        return torch.cat([value] * total) if isinstance(value, Tensor) else value

    for layer in layers:
        layer.batch_select_indices(torch.arange(rows))
    output = run(*map_tensors(first_copy, args), **map_tensors(first_copy, kwargs))
    for layer in layers:
        layer.batch_select_indices(torch.arange(rows, device=layer.device).repeat(total))
    return tree_map(all_copies, output)


def map_tensors(function: Callable[[Any], Any], values: Any) -> Any:
    """Return arguments (list) or keyword arguments (dict) with `function` called on tensors."""
    if isinstance(values, Mapping):
        return dict(zip(values, map_tensors(function, values.values()), strict=True))
    # Nearly all values are tensors. One tree_map over all would take a fifth of a step's host time.
    return [
        function(value) if isinstance(value, Tensor) else tree_map(function, value)
        for value in values
    ]
