"""Dense directions: a kept block runs once for each probe, with copies of its parameters.

    block, gathered  --noise-->  theta + scale * z of all its parameters, in one piece of memory
                                 |  in the place of the parameters, for the rows of one probe
                                 v  overwritten by the copies of the next block

A probe and its opposite share a draw of z, so there are two copies of a block at a time, and the
memory stays where it is. The modules outside the blocks run in the same way, with copies that are
freed. The stored weights are never written to, so that nothing drifts.

Copies have the dtype of their parameter, but for norms of 16 bits: these hold nothing but vectors
near 1, where 16 bits are too coarse for theta + mu z. They get float32 copies, and then compute in
float32. The biases of 16-bit products are perturbed in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from lezo_ds.forward.batch import MicroBatch
from lezo_ds.forward.directions import Directions, PassState, Perturber
from lezo_ds.forward.probes import Args, Forward, Kwargs, Perturbation, Place
from lezo_ds.noise import Copies, UpdateTarget, Weight, bytes_of_copies
from lezo_ds.sharding.quantization import values_of
from lezo_ds.sharding.tensor_parallel import LOOKUP_FORWARDS, look_up
from lezo_ds.zo.passes import KeyedProbe
from lezo_ds.zo.updates import Update, UpdatePrecision

COPIES_AT_ONCE = 2
"""Copies of a block that are in memory at a time: those of a probe and of its opposite."""


class DenseDirections(Directions):
    """Each element of z has its own number."""

    _memory = torch.empty(0, dtype=torch.uint8)

    def start_pass(
        self, state: PassState, perturbation: Perturbation, batch: MicroBatch
    ) -> Perturber:
        return DensePerturber(state, self, keeps_copies=batch.prompts is not None)

    def memory_for(self, weights: Sequence[Weight]) -> Tensor:
        """Return memory for two copies of a block. It is that of the block before."""
        num_bytes = COPIES_AT_ONCE * bytes_of_copies(weights)
        device = weights[0].theta.device
        memory = self._memory
        if len(memory) < num_bytes or memory.device != device:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._memory

    def perturb(
        self,
        weights: Sequence[Weight],
        probes: Sequence[KeyedProbe],
        memory: Tensor | None = None,
    ) -> Copies:
        """Return theta + scale * z of each weight at a probe, and at its opposite.

        Source: MeZO (Malladi et al. 2023), Algorithm 1.

        Args:
            weights: on one device, at least one.
            probes: one of the `with_opposites`. Each has one key.
            memory: uint8, for the copies; None: their own.

        Returns:
            For each weight, a copy for each probe, of theta's shape, or [len(rows), width]. A copy
            for scale 0 may be theta itself: do not write to it.
        """
        first = probes[0]
        if first.scale == 0:
            return [[_unperturbed(weight)] for weight in weights]
        kernels = self.kernels_of(weights[0].theta.device)
        entries = self.law.entries
        return kernels.perturb(entries, weights, first.key, first.scale, len(probes), memory)

    def update(
        self,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        kernels = self.kernels_of(targets[0].values.device)
        kernels.update(self.law.entries, targets, updates, precision)


def with_opposites(probes: Sequence[KeyedProbe]) -> Iterator[Sequence[KeyedProbe]]:
    """Yield the probes that share a draw of z: each, with its opposite if that comes next."""
    index = 0
    while index < len(probes):
        keys, scale = probes[index]
        has_opposite = scale != 0 and (keys, -scale) in probes[index + 1 : index + 2]
        number = 2 if has_opposite else 1
        yield probes[index : index + number]
        index += number


def _unperturbed(weight: Weight) -> Tensor:
    values = weight.theta if weight.rows is None else weight.theta[weight.rows]
    return values.to(weight.out_dtype)


class DensePerturber(Perturber):
    """Runs blocks, and modules outside them, once for each probe.

    Args:
        state: of the pass.
        directions: of the run.
        keeps_copies: whether the pass writes answers. It then has one probe, whose copies stay to
            the last token.
    """

    def __init__(
        self, state: PassState, directions: DenseDirections, *, keeps_copies: bool
    ) -> None:
        super().__init__(state)
        self._directions = directions
        self._keeps_copies = keeps_copies
        self._kept: dict[nn.Module, Sequence[Tensor]] = {}

    def run_module(
        self,
        module: nn.Module,
        own_forward: Forward,
        active: Sequence[Place],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        current = self.state.current
        has_copies = current.num_copies > 1
        if type(module).forward in LOOKUP_FORWARDS:
            # An embedding: perturb only the rows that its tokens read.
            (ids,) = [*args, *kwargs.values()]  # nn.Embedding calls its argument `input`
            if has_copies and ids.shape == (current.tokens,):
                ids = ids[None]  # positions, which all rows share
            run = partial(self.rows_of, active[0])
            return look_up(module, ids, lambda own: self.state.run_each_probe(run, [own], {}))
        copies = self._copies(module, active, current.probes)

        def run_probe(*args: Any, **kwargs: Any) -> Any:
            with _swapped(active, next(copies)):
                output = own_forward(*args, **kwargs)
            # An embedding [tokens, width] is that of positions, which all rows share.
            if has_copies and isinstance(module, nn.Embedding) and output.dim() == 2:
                return output[None]
            return output

        return self.state.run_each_probe(run_probe, args, kwargs)

    def rows_of(self, place: Place, rows: Tensor) -> Tensor:
        theta = place.trained.parameter.data
        table = theta.view(len(theta), -1)
        own = rows.reshape(-1).long()  # ids may be int32
        weight = Weight(table, place.trained.elements, theta.dtype, own)
        ((copy,),) = self._directions.perturb([weight], self.state.current.probes)
        return copy.view(*rows.shape, *theta.shape[1:])

    def _copies(
        self, module: nn.Module, active: Sequence[Place], probes: Sequence[KeyedProbe]
    ) -> Iterator[Sequence[Tensor]]:
        """Yield the copies at each probe, one for each place."""
        if module in self._kept:
            yield self._kept[module]
            return
        weights = []
        for place in active:
            theta = values_of(place.trained.parameter)
            weight = Weight(theta, place.trained.elements, place.dtype_of_copies)
            weights.append(weight)
        memory = None
        # A module outside the blocks may have blocks in it.
        if module in self.state.blocks and not self._keeps_copies:
            memory = self._directions.memory_for(weights)
        for some in with_opposites(probes):
            copies = self._directions.perturb(weights, some, memory)
            for of_probe in zip(*copies, strict=True):
                # A copy at scale 0 is theta itself, which ZeRO-3 could not release.
                if self._keeps_copies and some[0].scale != 0:
                    self._kept[module] = of_probe
                yield of_probe


@contextmanager
def _swapped(places: Sequence[Place], copies: Sequence[Tensor]) -> Iterator[None]:
    """Let modules read the copies, one for each place, while this lasts."""
    for place, copy in zip(places, copies, strict=True):
        place.table[place.key] = copy
    try:
        yield
    finally:
        for place in places:
            place.table[place.key] = place.trained.parameter


def widen_norm(norm: nn.Module) -> None:
    """Let a norm of 16 bits compute in float32 while it has copies in float32."""
    own_forward = norm.forward
    table: dict[str, Any] = norm._parameters
    dtype = next(norm.parameters()).dtype

    @wraps(own_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if all(vector is None or vector.dtype == dtype for vector in table.values()):
            return own_forward(*args, **kwargs)
        wide_kwargs = {name: _wide(value) for name, value in kwargs.items()}
        return own_forward(*map(_wide, args), **wide_kwargs).to(dtype)

    if dtype != torch.float32:
        norm.forward = forward


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    return value
