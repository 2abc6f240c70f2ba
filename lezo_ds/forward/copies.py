"""Copies of a batch, one for each probe: where they begin, and the share of some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lezo_ds.errors import UserError


class SharedStart:
    """Copies the batch where the first perturbed block begins. Before it, all probes have the same pass."""

    def __init__(self, first: int, rows: int, num_copies: int) -> None:
        self.first = first  # index of that block
        self._rows = rows  # of one copy
        self._num_copies = num_copies
        # By identity, and with the tensor itself, so that no other tensor gets its identity meanwhile.
        self._copied: dict[int, tuple[Tensor, Tensor]] = {}

    def copied(self, value: Any, is_first: bool) -> Any:  # noqa: ANN401
        """Return the copies of an argument of the first perturbed block, or of a later one.

        A tensor of one dimension, or of one row where the batch has more, is the same for all rows. Hidden
        states of a later block have copies already, but masks come without copies to each block.
        """
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        is_batch = value.shape[0] % self._rows == 0 if is_first else value.shape[0] == self._rows
        if is_batch and id(value) not in self._copied:
            self._copied[id(value)] = value, torch.cat([value] * self._num_copies)
        return self._copied.get(id(value), (value, value))[1]


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

    def share(value: Any) -> Any:  # noqa: ANN401
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


def mapped(function: Callable[[Any], Any], values: Any) -> Any:  # noqa: ANN401
    """Return arguments, or keyword arguments, with `function` called on each tensor in them."""
    # Nearly all are tensors. One tree_map would take a fifth of the host's time of a step.
    if isinstance(values, Mapping):
        return dict(zip(values, mapped(function, values.values()), strict=True))
    return [function(v) if isinstance(v, Tensor) else tree_map(function, v) for v in values]
