"""Runs the part of a model that all probes have in common once for the batch, and copies the batch after it.

If no parameter outside the transformer blocks is perturbed, all probes give the same hidden states up to the
first block that a step perturbs. The copies of the batch are then made where this block begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from lezo_ds.forward.perturbed_modules import Perturbation, PerturbedModules, map_tensors


class _Copies:
    """The copies of the tensors that the blocks of one forward pass are given.

    Args:
        first: index of the first block that runs on the copies.
        perturbation: at least two probes, each with a copy of its own.
        rows: number of rows of the batch.
    """

    def __init__(self, first: int, perturbation: Perturbation, rows: int) -> None:
        self.first = first
        self.perturbation = perturbation
        self.rows = rows
        # By identity, and with the tensor itself, so that no other tensor gets its identity meanwhile.
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def of_first(self, value: Any) -> Any:  # noqa: ANN401
        """Return the copies of a tensor that the first block is given: no argument of it has copies yet."""
        if not isinstance(value, Tensor) or not self._is_batched(value):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, torch.cat([value] * len(self.perturbation.probes))
        return self._made[id(value)][1]

    def of_later(self, value: Any) -> Any:  # noqa: ANN401
        """Return the copies of a tensor that a later block is given, which may have them already.

        The block before gives hidden states of all copies. What the model has made before its blocks, such as
        masks, comes without copies to each block.
        """
        if not isinstance(value, Tensor):
            return value
        if id(value) in self._made or value.shape[:1] == (self.rows,):
            return self.of_first(value)
        return value

    def _is_batched(self, value: Tensor) -> bool:
        # A tensor of one dimension, or of one row where the batch has more, is the same for all rows.
        return value.dim() > 1 and value.shape[0] % self.rows == 0


class SharedStart:
    """Lets the blocks of a model begin with one copy of the batch.

    Args:
        modules: the model's modules. Before the first perturbed block, they run at theta.
        blocks: the transformer blocks in order; their `forward` methods are replaced.
    """

    def __init__(self, modules: PerturbedModules, blocks: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._copies: _Copies | None = None
        for index, block in enumerate(blocks):
            self._wrap(index, block)

    @contextmanager
    def running(self, first: int, perturbation: Perturbation, rows: int) -> Iterator[None]:
        """Run a model on the batch at theta, and from a block on on a copy of the batch for each probe.

        Args:
            first: index of the first block that is perturbed.
            perturbation: at least two probes.
            rows: number of rows of the batch.
        """
        self._copies = _Copies(first, perturbation, rows)
        try:
            with self._modules.running(None, rows):
                yield
        finally:
            self._copies = None

    def _wrap(self, index: int, block: nn.Module) -> None:
        original: Callable[..., Any] = block.forward

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            copies = self._copies
            if copies is None or index < copies.first:
                return original(*args, **kwargs)
            copy = copies.of_later
            if index == copies.first:
                copy = copies.of_first
                self._modules.perturb_from_here(copies.perturbation, copies.rows)
            copied = {name: map_tensors(copy, value) for name, value in kwargs.items()}
            return original(*(map_tensors(copy, value) for value in args), **copied)

        block.forward = forward
