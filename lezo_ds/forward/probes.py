"""What a forward pass at several probes is: its probes, the copies of its batch, what it perturbs.

A probe is a point theta + scale * z(key) at which the loss is measured. A pass of k probes repeats
its batch k times, so that one gather of a weight serves all of them:

    rows of the input   [0, n)      [n, 2n)     ...   [(k - 1) n, k n)
    copy of the batch   of probe 0  of probe 1  ...   of probe k - 1

What has no perturbed parameters runs once, on all k * n rows. For all else, a `Perturber` decides
how the copies meet the weights of their probes.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.cache_utils import Cache

from lezo_ds.errors import UserError
from lezo_ds.noise import Elements
from lezo_ds.sharding.quantization import full_shape
from lezo_ds.zo.passes import KeyedProbe

Forward = Callable[..., Any]
"""The forward method of a module."""
Args = Sequence[Any]
"""Its positional arguments."""
Kwargs = Mapping[str, Any]
"""Its arguments by name."""


@dataclass(frozen=True)
class Perturbation:
    """The weights at which a forward pass, or a part of it, runs.

    Attributes:
        probes: each runs on its own copy of the batch, and has as many keys as the others. Without
            any, the pass runs at theta, on one copy.
        dropped_layers: indices of the transformer blocks that stay at theta.
        rows: number of rows of one copy, set when the model is called.
        tokens: number of tokens in a row, set at the same time.
    """

    probes: tuple[KeyedProbe, ...]
    dropped_layers: frozenset[int] = frozenset()
    rows: int = 1
    tokens: int = 1

    @property
    def num_copies(self) -> int:
        """Number of copies of the batch."""
        return len(self.probes) or 1

    def one_by_one(self) -> Iterator[Perturbation]:
        """Yield a perturbation for each probe."""
        for probe in self.probes:
            yield Perturbation((probe,), self.dropped_layers, self.rows, self.tokens)

    def run_copies(
        self,
        run: Forward,
        copies: Sequence[int],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Run a module on copies of the batch, and join the outputs.

        Args:
            run: (*args, **kwargs) -> output, called once for each different copy, in order.
            copies: index of the copy on which each part of the output is made.
            args: positional inputs for all copies (see `_take`).
            kwargs: keyword inputs for all copies. The values that the module stores in a UserDict
                for later blocks are joined as the outputs are.

        Raises:
            UserError: each copy would extend the key-value cache of all copies.
        """
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            raise UserError(
                "a block extends a key-value cache in a pass of several probes",
                fix="set zo.probes_per_pass=1 for this model",
            )
        outputs = {}
        left = {}
        for index in dict.fromkeys(copies):
            take = partial(self._take, index)
            own_args = map_tensors(take, args)
            own_kwargs = dict(zip(kwargs, map_tensors(take, kwargs.values()), strict=True))
            outputs[index] = run(*own_args, **own_kwargs)
            left[index] = _left_in(own_kwargs)
        for place, mapping in enumerate(_left_in(kwargs)):
            of_copies = [dict(left[index][place]) for index in copies]
            mapping.update(tree_map(self._join, *of_copies))
        return tree_map(self._join, *(outputs[index] for index in copies))

    def _take(self, index: int, value: Any) -> Any:
        """Return the part of a value that belongs to one copy.

        A tensor without a dimension of all rows is the same for all of them. Such are tensors
        [1, ...], for example of positions. Position ids [tokens] and biases [heads, 1, positions]
        show by their values that they are no rows. Values that are no tensors stay as they are.
        """
        if isinstance(value, UserDict):
            return type(value)(tree_map(partial(self._take, index), dict(value)))
        if not isinstance(value, Tensor):
            return value
        num_copies = len(self.probes)
        num_rows = num_copies * self.rows
        dimension = _dimension_of_rows(value, num_rows, self.tokens)
        if dimension is None:
            return value
        is_bias = value.dim() == 3 and value.shape[1] == 1 and len(value) < num_rows * self.tokens
        if value.dim() == 1 or is_bias:
            # Those of rows follow from the inputs, of which all copies have the same.
            first, *others = value.chunk(num_copies)
            if not all(torch.equal(first, other) for other in others):
                return value
        size = value.shape[dimension] // num_copies
        return value.narrow(dimension, index * size, size)

    def _join(self, *parts: Any) -> Any:
        """Return the outputs of all copies as one; of scalars and other values, the first."""
        first = parts[0]
        if not isinstance(first, Tensor) or first.dim() == 0:
            return first
        dimension = _dimension_of_rows(first, self.rows, self.tokens)
        if dimension is not None:
            return torch.cat(parts, dimension)
        shape = tuple(first.shape)
        if len(first) == 1:  # made of tensors that all rows share
            shape = (self.rows, *shape[1:])
        return torch.cat([part.expand(shape) for part in parts])


AT_THETA = Perturbation(())
"""One pass at the weights themselves."""


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
    has_rows_second = len(others) == 3 and others[:2] == [num_rows, num_tokens]
    # The weights of attention, [rows, heads, tokens, tokens], may have as many heads as rows.
    if has_rows_second and length == num_rows > 1 and others[2] != num_tokens:
        raise UserError(
            f"a tensor {list(value.shape)} of a block may have its {num_rows} rows in two "
            "dimensions",
            fix="set another train.micro_batch_size, or zo.probes_per_pass=1",
        )
    if length in (num_rows, num_rows * num_tokens):
        return 0
    if has_rows_second and length > 1:
        return 1
    if length % num_rows == 0 and others == [1, num_tokens]:
        return 0
    return None


class TrainedParameter(NamedTuple):
    """A parameter that may be perturbed.

    Attributes:
        parameter: holds theta while a module that reads it runs.
        block: index of its transformer block, or of its group of layers outside the blocks.
        elements: those that modules compute with on this rank.
    """

    parameter: nn.Parameter
    block: int
    elements: Elements


class Place(NamedTuple):
    """Where a trained parameter is read. A tied parameter is read in several places.

    Attributes:
        table: `_parameters` of the module that reads it. The module's own `__setattr__` refuses
            plain tensors where parameters are registered.
        key: its name in the table.
        trained: the parameter.
        dtype_of_copies: of its perturbed copies: float32 in norms, else its own. Around 1.0, a
            16-bit weight of a norm is too coarse to hold theta + mu z.
    """

    table: dict[str, Any]
    key: str
    trained: TrainedParameter
    dtype_of_copies: torch.dtype


def places_in(
    modules: Iterable[nn.Module], trainable: Mapping[nn.Parameter, TrainedParameter]
) -> list[Place]:
    """Return where some modules read trained parameters of their own."""
    places = []
    for module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter in trainable:
                dtype = torch.float32 if is_norm(module) else parameter.dtype
                places.append(Place(module._parameters, key, trainable[parameter], dtype))
    return places


def is_norm(module: nn.Module) -> bool:
    """Return whether a module holds nothing but vectors, at least one."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    has_children = next(module.children(), None) is not None
    are_vectors = all(len(full_shape(parameter)) == 1 for parameter in own)
    return bool(own) and not has_children and are_vectors
