"""Copies of a batch, one for each probe: runs on each of them, or once for all of them.

Tensors of a pass have the rows of all copies, one copy after the other: [copies * rows, ...].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from lezo_ds.errors import UserError
from lezo_ds.forward.answer_cache import RoomyLayer

Forward = Callable[..., Any]
"""The forward method of a module."""
Args = Sequence[Any]
"""Its positional arguments."""
Kwargs = Mapping[str, Any]
"""Its arguments by name."""

_KEYS_AND_VALUES = (DynamicLayer, DynamicSlidingWindowLayer, RoomyLayer)


class CopiedBatch(NamedTuple):
    """The sizes of a batch in a pass: `copies` times `rows` rows of `tokens` tokens."""

    copies: int
    rows: int
    tokens: int

    def run_each(self, run: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run a module on each copy, and join the outputs.

        Args:
            run: (*args, **kwargs) -> output, called once for each copy, in order.
            args: inputs for all copies (see `_take`).
            kwargs: likewise. What the module adds to a mapping among them is joined, too: some
                blocks leave keys and values there for later blocks.

        Raises:
            UserError: a tensor has no dimension of all rows, or a copy would extend the key-value
                cache of all copies.
        """
        return self._run(run, args, kwargs, range(self.copies))

    def run_once(self, run: Forward, args: Args, kwargs: Kwargs, cache_layer: int) -> Any:
        """Run a block on one of equal copies; return its output for all of them.

        Args:
            run: the forward method of the block.
            args: inputs for all copies.
            kwargs: likewise.
            cache_layer: index of the layer of a key-value cache that the block extends, if there is
                a cache. It has the rows of all copies, before and after.
        """
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        if not caches:
            return self._run(run, args, kwargs, [0] * self.copies)
        layers = caches[0].layers[cache_layer : cache_layer + 1]
        if not layers or type(layers[0]) not in _KEYS_AND_VALUES:
            return run(*args, **kwargs)  # the state may be more than keys and values
        layers[0].batch_select_indices(torch.arange(self.rows))
        output = self._run(run, args, kwargs, [0] * self.copies, takes_cache=True)
        of_all = torch.arange(self.rows, device=layers[0].device).repeat(self.copies)
        layers[0].batch_select_indices(of_all)
        return output

    def _run(
        self,
        run: Forward,
        args: Args,
        kwargs: Kwargs,
        copies: Sequence[int],
        *,
        takes_cache: bool = False,
    ) -> Any:
        """Return the outputs of some copies, of which each runs once, in the order of `copies`."""
        outputs: dict[int, Any] = {}
        changes: dict[int, list[Any]] = {}  # of each mapping
        mappings = [value for value in kwargs.values() if isinstance(value, MutableMapping)]
        for index in copies:
            if index in outputs:
                continue
            take = partial(self._take_any, index, takes_cache=takes_cache)
            own_args = [take(value) for value in args]
            own_kwargs = {name: take(value) for name, value in kwargs.items()}
            _check_that_rows_are_cut([*args, *kwargs.values()], [*own_args, *own_kwargs.values()])
            own_mappings = [own for own in own_kwargs.values() if isinstance(own, MutableMapping)]
            before = list(map(dict, own_mappings))
            outputs[index] = run(*own_args, **own_kwargs)
            changes[index] = [
                {key: entry for key, entry in own.items() if entry is not old.get(key)}
                for own, old in zip(own_mappings, before, strict=True)
            ]
        for place, mapping in enumerate(mappings):
            mapping.update(tree_map(self._join, *(changes[index][place] for index in copies)))
        return tree_map(self._join, *(outputs[index] for index in copies))

    def _take_any(self, index: int, value: Any, *, takes_cache: bool) -> Any:
        """Return what one copy needs of an argument of any type."""
        take = partial(self._take, index)
        if isinstance(value, Tensor):  # as nearly all are, and a tree_map takes long
            return take(value)
        if isinstance(value, MutableMapping):
            own = copy.copy(value)
            own.update({key: tree_map(take, entry) for key, entry in value.items()})
            return own
        if isinstance(value, Cache) and not takes_cache:
            raise UserError(
                "a block extends a key-value cache in a pass of several probes",
                fix="set zo.probes_per_pass=1 for this model",
            )
        return tree_map(take, value)

    def _take(self, index: int, value: Any) -> Any:
        """Return the part of a tensor that belongs to one copy.

        A tensor without a dimension of all rows is the same for all of them. Such are tensors
        [1, ...], for example of positions. Values that are no tensors stay as they are.
        """
        if not isinstance(value, Tensor):
            return value
        dimension = _dimension_of_rows(value, self.copies * self.rows, self.tokens)
        if dimension is None:
            return value
        size = value.shape[dimension] // self.copies
        return value.narrow(dimension, index * size, size)

    def _join(self, *parts: Any) -> Any:
        """Return the outputs of all copies as one; of scalars and other values, the first."""
        first = parts[0]
        if not isinstance(first, Tensor) or first.dim() == 0:
            return first
        dimension = _dimension_of_rows(first, self.rows, self.tokens)
        if dimension is None and len(first) == 1:  # made of tensors that all rows share
            parts = tuple(part.expand(self.rows, *part.shape[1:]) for part in parts)
        return torch.cat(parts, dimension or 0)


def _check_that_rows_are_cut(values: Sequence[Any], cut: Sequence[Any]) -> None:
    """Refuse tensors that are neither cut nor the same for all rows: [1, ...]."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.dim() > 0]
    is_cut = any(own is not value for own, value in zip(cut, values, strict=True))
    if not is_cut and not any(len(tensor) == 1 for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise UserError(
            f"a module gets tensors {shapes} without a dimension of all rows of the batch",
            fix="set zo.probes_per_pass=1 for this model",
        )


def _dimension_of_rows(value: Tensor, num_rows: int, num_tokens: int) -> int | None:
    """Return the dimension that has all rows; None if the tensor is the same for all rows.

    That is the first one of most tensors, [rows, ...] or [rows * tokens, ...], and of Bloom's
    biases of positions, [rows * heads, 1, tokens]. Gemma 3n stacks streams of hidden states,
    [streams, rows, tokens, width].
    """
    if value.dim() == 0:
        return None
    length, *others = value.shape
    if length in (num_rows, num_rows * num_tokens):
        return 0
    if len(others) == 3 and length > 1 and others[:2] == [num_rows, num_tokens]:
        return 1
    if length % num_rows == 0 and others == [1, num_tokens]:
        return 0
    return None
