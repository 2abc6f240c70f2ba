"""Copies of a batch, one for each probe: runs on each of them, or once for all of them.

Tensors of a pass have the rows of all copies, one copy after the other: [copies * rows, ...].
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache

from lezo_ds.errors import UserError
from lezo_ds.zo.passes import KeyedProbe

Forward = Callable[..., Any]
"""The forward method of a module."""
Args = Sequence[Any]
"""Its positional arguments."""
Kwargs = Mapping[str, Any]
"""Its arguments by name."""


class ProbePass(NamedTuple):
    """The forward pass that runs, or the part of it that runs one of its probes.

    Its batch has a copy for each probe: `rows` rows of `tokens` tokens.

    Attributes:
        probes: none if the pass runs at theta.
        dropped_layers: indices of the blocks that stay at theta.
        rows: number of rows of one copy.
        tokens: number of tokens of a row.
    """

    probes: tuple[KeyedProbe, ...] = ()
    dropped_layers: frozenset[int] = frozenset()
    rows: int = 1
    tokens: int = 1

    def run_copies(self, run: Forward, copies: Sequence[int], args: Args, kwargs: Kwargs) -> Any:
        """Run a module on copies of the batch, and join the outputs.

        Args:
            run: (*args, **kwargs) -> output, called once for each different copy, in order.
            copies: index of the copy on which each part of the output is made.
            args: inputs for all copies (see `_take`).
            kwargs: likewise. What the module leaves for later blocks in a UserDict is joined, too.

        Raises:
            UserError: each copy would extend the key-value cache of all copies.
        """
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            raise UserError(
                "a block extends a key-value cache in a pass of several probes",
                fix="set zo.probes_per_pass=1 for this model",
            )
        results = {}
        for index in dict.fromkeys(copies):
            take = partial(self._take, index)
            own_args = map_tensors(take, args)
            own_kwargs = dict(zip(kwargs, map_tensors(take, kwargs.values()), strict=True))
            output = run(*own_args, **own_kwargs)
            results[index] = output, list(map(dict, _left_in(own_kwargs)))
        output, left = tree_map(self._join, *(results[index] for index in copies))
        for mapping, of_all in zip(_left_in(kwargs), left, strict=True):
            mapping.update(of_all)
        return output

    def _take(self, index: int, value: Any) -> Any:
        """Return the part of a value that belongs to one copy.

        A tensor without a dimension of all rows is the same for all of them. Such are tensors
        [1, ...], for example of positions. Values that are no tensors stay as they are.
        """
        if isinstance(value, UserDict):
            return type(value)(tree_map(partial(self._take, index), dict(value)))
        if not isinstance(value, Tensor):
            return value
        dimension = _dimension_of_rows(value, len(self.probes) * self.rows, self.tokens)
        if dimension is None:
            return value
        size = value.shape[dimension] // len(self.probes)
        return value.narrow(dimension, index * size, size)

    def _join(self, *parts: Any) -> Any:
        """Return the outputs of all copies as one; of scalars and other values, the first."""
        first = parts[0]
        if not isinstance(first, Tensor) or first.dim() == 0:
            return first
        dimension = _dimension_of_rows(first, self.rows, self.tokens)
        if dimension is None and len(first) == 1:  # made of tensors that all rows share
            parts = tuple(part.expand(self.rows, *part.shape[1:]) for part in parts)
        if dimension is None and first.dim() == 2 and len(first) == self.tokens:
            # Positions of all rows, [tokens, width], are added to [rows, tokens, width].
            parts = tuple(part.expand(self.rows, *part.shape) for part in parts)
        return torch.cat(parts, dimension or 0)


AT_THETA = ProbePass()


def _left_in(kwargs: Kwargs) -> list[UserDict[Any, Any]]:
    """Return the arguments in which a block leaves something for later blocks."""
    return [value for value in kwargs.values() if isinstance(value, UserDict)]


def map_tensors(function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """Return values with `function` called on their leaves."""
    # Nearly all values are tensors. One tree_map over all would take a fifth of a step's host time.
    return [
        function(value) if isinstance(value, Tensor) else tree_map(function, value)
        for value in values
    ]


def _dimension_of_rows(value: Tensor, num_rows: int, num_tokens: int) -> int | None:
    """Return the dimension that has all rows; None if the tensor is the same for all rows.

    That is the first one of most tensors, [rows, ...] or [rows * tokens, ...], and of Bloom's
    biases of positions, [rows * heads, 1, tokens]. Gemma 3n stacks streams of hidden states,
    [streams, rows, tokens, width].

    Raises:
        UserError: there are as many rows as streams, or as heads of keys [rows, heads, tokens, n].
    """
    if value.dim() == 0:
        return None
    length, *others = value.shape
    if length == num_rows > 1 and len(others) == 3 and others[:2] == [num_rows, num_tokens]:
        raise UserError(
            f"a tensor [{length}, {num_rows}, {num_tokens}, {others[2]}] of a block may have its "
            f"{num_rows} rows in two dimensions",
            fix="set another train.micro_batch_size, or zo.probes_per_pass=1",
        )
    if length in (num_rows, num_rows * num_tokens):
        return 0
    if len(others) == 3 and length > 1 and others[:2] == [num_rows, num_tokens]:
        return 1
    if length % num_rows == 0 and others == [1, num_tokens]:
        return 0
    return None
