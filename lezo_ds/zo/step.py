"""A step as every rank knows it: what is measured where, and what the losses say.

The algorithm is LeZO (Wang et al. 2024, Algorithm 1). MeZO is its case without dropped layers;
other estimators have other probes. A step is made of a plan, which rank 0 decides and broadcasts,
and of the shape of the batch, which every rank knows:

    line 3         StepPlan         dropped layers, key of the noise, learning rate; and the probes
    lines 4 to 6   Step.passes      the forward passes, which the ranks share, and their probes:
                                    theta + scale * z, at which a pass measures the loss
    line 7         Step.estimate    projected gradients from the losses of all ranks
    line 8         StepRecord       what every rank updates its own shards by (updates.py)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lezo_ds.errors import UserError
from lezo_ds.zo.estimators import Estimate, Estimator, Probe, add_in_order, mean_losses
from lezo_ds.zo.keys import direction_keys
from lezo_ds.zo.passes import Groups, KeyedProbe, Pass
from lezo_ds.zo.records import StepPlan, StepRecord


@dataclass(frozen=True)
class Step:
    """One step on all ranks. Its methods are pure.

    The losses of a step are one vector, in which each rank fills the places of its own passes:

        micro-batch        0                           1
        group of it        0             1             0             1
        probe              0   1   2     0   1   2     0   1   2     0   1   2
        place              0   1   2     3   4   5     6   7   8     9  10  11

    Attributes:
        plan: what rank 0 has decided.
        probes: the points at which the loss is measured.
        estimator: has chosen the probes, and reads their losses.
        groups: of the batch's examples. Each has directions of its own.
        probes_per_pass: most probes of a forward pass.
        total_weight: what the summed losses of a probe are divided by.
        may_lack_losses: whether a loss that is NaN is that of an answer that no reward judges.
    """

    plan: StepPlan
    probes: tuple[Probe, ...]
    estimator: Estimator
    groups: Groups
    probes_per_pass: int
    total_weight: float
    may_lack_losses: bool = False

    @property
    def passes(self) -> list[Pass]:
        """All forward passes, in the order in which workers share them.

        A pass gathers each weight once for all of its probes.
        """
        passes = []
        for micro_batch in range(self.groups.num_micro_batches):
            probes = self._keyed_probes(micro_batch)
            for first in range(0, len(probes), self.probes_per_pass):
                of_pass = probes[first : first + self.probes_per_pass]
                passes.append(Pass(micro_batch, first, of_pass))
        return passes

    def _keyed_probes(self, micro_batch: int) -> tuple[KeyedProbe, ...]:
        """Return all probes, with the keys of the directions of a micro-batch's groups."""
        groups = self.groups.of_micro_batch(micro_batch)
        keys = direction_keys(self.plan.key, self.num_directions)
        per_group = self.estimator.num_directions
        keyed = []
        for probe in self.probes:
            of_groups = [keys[group * per_group + probe.direction] for group in groups]
            keyed.append(KeyedProbe(tuple(of_groups), probe.scale))
        return tuple(keyed)

    @property
    def num_losses(self) -> int:
        """Length of the vector of losses."""
        groups = self.groups
        return groups.num_micro_batches * groups.per_micro_batch * len(self.probes)

    @property
    def num_directions(self) -> int:
        """Number of directions of all groups."""
        return self.groups.number * self.estimator.num_directions

    def place(self, micro_batch: int, group: int, probe: int) -> int:
        """Return the place of a loss: of a probe, for one of the groups in a micro-batch."""
        row = micro_batch * self.groups.per_micro_batch + group
        return row * len(self.probes) + probe

    def add(self, losses: Any, forward_pass: Pass, of_probes: Sequence[Any]) -> None:
        """Put the losses of a pass in their places.

        Args:
            losses: tensor float64 [num_losses].
            forward_pass: of this rank.
            of_probes: for each of its probes, a tensor of the losses of all examples.
        """
        if not forward_pass.counts:
            return
        first = forward_pass.first_probe
        indices = range(first, first + len(forward_pass.probes))
        for probe, of_examples in zip(indices, of_probes, strict=True):
            of_groups = of_examples.double().chunk(self.groups.per_micro_batch)
            for group, of_group in enumerate(of_groups):
                total = of_group.sum()
                if self.may_lack_losses:  # an example without a loss counts as those that have one
                    total = of_group.nanmean() * len(of_group)
                losses[self.place(forward_pass.micro_batch, group, probe)] = total

    def mean_losses(self, sums: Sequence[float]) -> list[list[float]]:
        """Return the mean loss over each group of examples at each probe: [groups][probes].

        Each group has the same part of the batch's weight, so that the mean over the groups is the
        mean over the batch.

        Args:
            sums: [num_losses], the summed losses at all places.
        """
        num_probes = len(self.probes)
        size = len(sums) // self.groups.number
        weight = self.total_weight / self.groups.number
        return [
            mean_losses(sums[first : first + size], num_probes, weight)
            for first in range(0, len(sums), size)
        ]

    def _filled(self, sums: Sequence[float]) -> Sequence[float]:
        """Return sums in which a probe without losses has the mean of the group's other probes.

        So no direction gains by answers that no reward judges. A group without losses has the mean
        of all others, so it does not change the loss of the step. If no answer of the step is
        judged, the sums stay NaN.
        """
        of_step = [each for each in sums if not math.isnan(each)]
        if not of_step:
            return sums
        filled = []
        num_probes = len(self.probes)
        for first in range(0, len(sums), num_probes):
            of_probes = sums[first : first + num_probes]
            known = [each for each in of_probes if not math.isnan(each)] or of_step
            mean = add_in_order(known) / len(known)
            filled += [mean if math.isnan(each) else each for each in of_probes]
        return filled

    def estimate(self, sums: Sequence[float]) -> StepRecord:
        """Return the record of the step, from the summed losses of all ranks, [num_losses].

        The step is not applied if a loss or a projected gradient is not finite.

        Raises:
            UserError: a user-defined estimator has not estimated each direction.
        """
        if self.may_lack_losses:
            sums = self._filled(sums)
        try:
            result = self.estimator.estimate_groups(self.probes, self.mean_losses(sums))
        except ArithmeticError:  # an estimate that overflows counts as not finite
            result = Estimate(loss=math.nan, projected_grads=())
        if not result.is_finite:
            return StepRecord(**vars(self.plan), projected_grads=(), loss=None, applied=False)
        number = self.num_directions
        gradients = tuple(map(float, result.projected_grads))  # they may be NumPy's, or tensors
        if len(gradients) != number:
            raise UserError(
                f"{type(self.estimator).__name__} returned {len(gradients)} projected gradients, "
                f"and the step has {number} directions",
                fix="return Estimate.projected_grads with one for each of num_directions",
            )
        return StepRecord(
            **vars(self.plan), projected_grads=gradients, loss=float(result.loss), applied=True
        )


@dataclass(frozen=True)
class PlanFormat:
    """The bytes of a run's plans. All ranks know their number, so no message announces its length.

        step        int64
        key         uint64
        rate        float64
        mu          float64
        dropped     a bit for each group, in ceil(num_groups / 8) bytes, the lowest bit first
        probes      uint32 direction, float64 scale, for each probe
        weights     float64 for each group, if `has_weights`

    All numbers are little-endian, without padding.

    Attributes:
        num_groups: number of transformer blocks and of groups of layers outside them.
        num_probes: number of probes of a step.
        has_weights: whether the layer policy weights the blocks.

    >>> PlanFormat(num_groups=42, num_probes=2, has_weights=False).num_bytes  # a model of 40 blocks
    62
    """

    num_groups: int
    num_probes: int
    has_weights: bool

    @property
    def num_bytes(self) -> int:
        return struct.calcsize(self._format)

    def pack(self, plan: StepPlan, probes: Sequence[Probe]) -> bytes:
        """Return the bytes of a plan and its probes."""
        dropped = sum(1 << layer for layer in plan.dropped_layers)
        numbers: list[float] = []
        for probe in probes:
            numbers += [probe.direction, probe.scale]
        return struct.pack(
            self._format,
            plan.step,
            plan.key,
            plan.learning_rate,
            plan.perturbation_scale,
            dropped.to_bytes(self._mask_bytes, "little"),
            *numbers,
            *plan.layer_weights,
        )

    def unpack(self, data: bytes) -> tuple[StepPlan, tuple[Probe, ...]]:
        """Return the plan and the probes whose bytes `pack` returned."""
        step, key, learning_rate, scale, mask, *rest = struct.unpack(self._format, data)
        dropped = int.from_bytes(mask, "little")
        numbers = rest[: 2 * self.num_probes]
        plan = StepPlan(
            step,
            key,
            dropped_layers=tuple(layer for layer in range(self.num_groups) if dropped >> layer & 1),
            learning_rate=learning_rate,
            perturbation_scale=scale,
            layer_weights=tuple(rest[2 * self.num_probes :]),
        )
        return plan, tuple(map(Probe, numbers[::2], numbers[1::2]))

    @property
    def _mask_bytes(self) -> int:
        return math.ceil(self.num_groups / 8)

    @property
    def _format(self) -> str:
        num_weights = self.num_groups if self.has_weights else 0
        return f"<qQdd{self._mask_bytes}s" + "Id" * self.num_probes + "d" * num_weights
