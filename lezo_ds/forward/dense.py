"""Dense directions: each probe has its own copy of each perturbed weight.

    theta [m, n], gathered  --noise-->  theta + scale_p * z(key_p) [m, n] for each probe p
                                        |  multiplied by the rows of probe p only
                                        v  freed when the module (or block) has run

The stored weights are never written to, so that nothing drifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lezo_ds.forward.batch import MicroBatch
from lezo_ds.forward.copies import Args, Forward, Kwargs
from lezo_ds.forward.directions import PROBES_AT_ONCE, Directions, PassState, Perturber
from lezo_ds.forward.module_calls import (
    call_with_weights,
    cast_floats,
    dtype_of_copies,
    is_16_bit_norm,
    is_product,
    product_at_probes,
)
from lezo_ds.forward.probes import Perturbation, TrainedParameter
from lezo_ds.noise import Copies, UpdateTarget, Weight
from lezo_ds.sharding.tensor_parallel import LOOKUP_FORWARDS, look_up
from lezo_ds.zo.passes import KeyedProbe
from lezo_ds.zo.updates import Update, UpdatePrecision


class DenseDirections(Directions):
    """Each element of z has its own number."""

    def start_pass(
        self, state: PassState, perturbation: Perturbation, batch: MicroBatch
    ) -> Perturber:
        return DensePerturber(state, self, batch.device)

    def perturb(self, weights: Sequence[Weight], probes: Sequence[KeyedProbe]) -> Copies:
        """Return theta + scale * z of each weight at each probe.

        A probe followed by the opposite one shares one draw of z with it.

        Source: MeZO (Malladi et al. 2023), Algorithm 1.

        Args:
            weights: on one device.
            probes: one for each copy. Each has one key.

        Returns:
            For each weight, a copy for each probe, of theta's shape, or [len(rows), width]. A copy
            for scale 0 may be theta itself: do not write to it.
        """
        copies: Copies = [[] for _ in weights]
        index = 0
        while weights and index < len(probes):
            key = probes[index].key
            scale = probes[index].scale
            num_signs = 1
            if scale == 0:
                new_copies = [[_unperturbed(weight)] for weight in weights]
            else:
                if ((key,), -scale) in probes[index + 1 : index + 2]:
                    num_signs = 2
                kernels = self.kernels_of(weights[0].theta.device)
                new_copies = kernels.perturb(self.law.entries, weights, key, scale, num_signs)
            for of_weight, new in zip(copies, new_copies, strict=True):
                of_weight += new
            index += num_signs
        return copies

    def update(
        self,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        if targets:
            kernels = self.kernels_of(targets[0].values.device)
            kernels.update(self.law.entries, targets, updates, precision)


def _unperturbed(weight: Weight) -> Tensor:
    values = weight.theta if weight.rows is None else weight.theta[weight.rows]
    return values.to(weight.out_dtype)


class DensePerturber(Perturber):
    """Makes perturbed copies of weights, and runs each probe's rows with its own copies.

    Copies live as long as a module runs. Two cases keep them longer: `begin_block` makes those of a
    whole block by one call of the noise, and while a model writes answers, all copies stay to the
    last token.
    """

    probes_at_once = PROBES_AT_ONCE

    def __init__(self, state: PassState, directions: DenseDirections, device: torch.device) -> None:
        super().__init__(state, takes_blocks=directions.kernels_of(device).takes_blocks)
        self._directions = directions
        self._kept: dict[tuple[nn.Parameter, KeyedProbe], Tensor] = {}

    def run_module(
        self,
        module: nn.Module,
        own_forward: Forward,
        active: Sequence[TrainedParameter],
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        state = self.state
        if type(module).forward in LOOKUP_FORWARDS:
            # An embedding: perturb only the rows that its tokens read.
            (ids,) = [*args, *kwargs.values()]  # nn.Embedding calls its argument `input`
            rows_of = partial(self.rows_of, active[0])
            return look_up(module, ids, lambda own: state.run_in_parts(1, rows_of, [own], {}))
        names = [entry.name for entry in active]
        copies = dict(zip(names, self._copies(active), strict=True))
        probes = state.current.probes
        num_probes = len(probes)
        # With one probe, no input has to be cut, so that any number of rows will do.
        rows = num_probes * state.current.rows if num_probes > 1 else 1
        if is_product(own_forward, args, kwargs, rows):
            return product_at_probes(module, copies, args[0], num_probes)

        def run_probe(*args: Any, **kwargs: Any) -> Any:
            (probe,) = state.current.probes
            number = probes.index(probe)
            weights = {name: of_probes[number] for name, of_probes in copies.items()}
            return call_with_weights(module, own_forward, weights, args, kwargs)

        is_norm = is_16_bit_norm(module)
        if is_norm:
            args, kwargs = cast_floats((list(args), kwargs), torch.float32)
        output = state.run_in_parts(1, run_probe, args, kwargs)
        return cast_floats(output, active[0].parameter.dtype) if is_norm else output

    def rows_of(self, table: TrainedParameter, rows: Tensor) -> Tensor:
        weight = _weight(table)._replace(rows=rows.reshape(-1).long())  # ids may be int32
        ((copy,),) = self._directions.perturb([weight], self.state.current.probes)
        return copy.view(*rows.shape, -1)

    def vector_of(self, entry: TrainedParameter) -> Tensor:
        ((vector,),) = self._copies([entry])
        return vector

    def begin_block(self, active: Sequence[TrainedParameter]) -> None:
        self._keep(active, self._copies(active))

    def end_block(self) -> None:
        if not self.state.current.writes_answers:
            self._kept = {}

    def _copies(self, active: Sequence[TrainedParameter]) -> Copies:
        """Return the copies of each parameter, one for each probe that runs."""
        probes = self.state.current.probes
        if self._kept and all((entry.parameter, probes[0]) in self._kept for entry in active):
            return [[self._kept[entry.parameter, probe] for probe in probes] for entry in active]
        weights = [_weight(entry) for entry in active]
        copies = self._directions.perturb(weights, probes)
        if self.state.current.writes_answers:
            self._keep(active, copies)
        return copies

    def _keep(self, active: Sequence[TrainedParameter], copies: Sequence[Sequence[Tensor]]) -> None:
        for entry, of_probes in zip(active, copies, strict=True):
            for probe, copy in zip(self.state.current.probes, of_probes, strict=True):
                self._kept[entry.parameter, probe] = copy


def _weight(entry: TrainedParameter) -> Weight:
    return Weight(entry.parameter.data, entry.elements, dtype_of_copies(entry.parameter))
