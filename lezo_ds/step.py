"""One step of zeroth-order training on all ranks.

The algorithm is LeZO (Wang et al. 2024, Algorithm 1). MeZO is its case without dropped layers;
other estimators have other probes. The functions below are the lines of the algorithm, in their
order:

    decide       line 3         rank 0 drops layers, chooses the key of the noise, and the probes
    forward      lines 4 to 6   every rank runs its passes, losses at theta + scale * z
    estimate     line 7         projected gradients from all losses
    apply        line 8         every rank updates its own shards (`LezoEngine.apply`)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import LossFunction, MicroBatch, StepBatch, to_device
from lezo_ds.forward.probes import Perturbation
from lezo_ds.noise import KeyedProbe
from lezo_ds.zo.estimators import Estimate, Probe, mean_losses_of_groups
from lezo_ds.zo.keys import direction_key, step_key
from lezo_ds.zo.passes import Groups, Pass
from lezo_ds.zo.records import StepRecord

if TYPE_CHECKING:
    from lezo_ds.engine import LezoEngine


def train_batch(engine: LezoEngine, batch: StepBatch, loss_function: LossFunction) -> StepRecord:
    """Do one step. `LezoEngine.train_batch` describes arguments, result and errors."""
    plan = broadcast_plan(engine)
    # theta itself stays as it is during the passes.
    losses = forward(engine, plan, batch, loss_function)
    # One all-reduce gives every loss to every rank, and proves that all work on the same plan and
    # batch.
    sums = engine.reduce_and_agree(losses, batch, {"plan": repr(plan)})
    record = estimate(engine, plan, batch, sums)
    # The journal comes first, as in any write-ahead log. Weights in memory are gone after a power
    # cut, so they need not wait for the disk: only what is on a disk must never be ahead of the
    # journal.
    engine.write_ahead(record)
    engine.apply(record.step, record.step + 1)
    return record


def broadcast_plan(engine: LezoEngine) -> StepPlan:
    """Return the plan of the next step, which rank 0 decides. A collective."""
    message = b""
    if engine.global_rank == 0:
        message = engine.plan_format.pack(decide(engine))
    message = distributed.broadcast_bytes(message, engine.plan_format.num_bytes)
    return engine.plan_format.unpack(message)


def decide(engine: LezoEngine) -> StepPlan:
    """Return the plan of the next step, a function of the run's seed and of its records so far."""
    layers = engine.layer_policy.sample(engine.seed, engine.records)
    return StepPlan(
        step=engine.global_steps,
        key=step_key(engine.seed, engine.global_steps),
        learning_rate=engine.learning_rate(),
        perturbation_scale=engine.config.perturbation_scale,
        dropped_layers=layers.dropped,
        layer_weights=layers.weights,
        probes=tuple(engine.estimator.probes(engine.records)),
    )


def forward(
    engine: LezoEngine, plan: StepPlan, batch: StepBatch, loss_function: LossFunction
) -> Tensor:
    """Run this rank's passes.

    Returns:
        float64 [places * probes], the losses of probe p at place q of the groups of examples at
        q * probes + p. Without groups, a place is a micro-batch. Losses of other ranks' passes are
        0, so that the sum over all ranks has every loss.
    """
    num_probes = len(plan.probes)
    groups = engine.groups(batch)
    num_losses = groups.num_places * num_probes
    losses = torch.zeros(num_losses, dtype=torch.float64, device=engine.device)
    passes = engine.passes_of_rank(engine.global_rank, len(batch))
    # All inputs are copied before the first pass, because a copy from the host waits for queued GPU
    # work.
    indices = {forward_pass.micro_batch for forward_pass in passes}
    inputs = {index: to_device(batch[index], engine.device) for index in indices}
    for forward_pass in passes:
        index = forward_pass.micro_batch
        outputs = engine.run(inputs[index], perturbation(engine, plan, forward_pass, groups))
        first_place = index * groups.per_micro_batch
        for probe, output in zip(forward_pass.probes, outputs, strict=True):
            of_examples = loss_function(output, inputs[index]).double()
            if engine.config.examples_per_direction is not None:
                check_losses(len(of_examples), inputs[index])
            for offset, of_group in enumerate(of_examples.chunk(groups.per_micro_batch)):
                if forward_pass.counts:
                    losses[(first_place + offset) * num_probes + probe] = of_group.sum()
    return losses


def check_losses(num_losses: int, micro_batch: MicroBatch) -> None:
    """Refuse losses of which nobody can say to which group of examples each belongs."""
    if num_losses != micro_batch.num_examples:
        raise UserError(
            f"zo.examples_per_direction needs a loss for each of {micro_batch.num_examples} "
            f"examples of a micro-batch, and its loss function returned {num_losses}",
            fix="return one loss per example, or name the examples in MicroBatch.examples",
        )


def perturbation(
    engine: LezoEngine, plan: StepPlan, forward_pass: Pass, groups: Groups
) -> Perturbation:
    """Return the weights at which a pass measures the loss."""
    first_place = forward_pass.micro_batch * groups.per_micro_batch
    probes = []
    keys_of_groups = []
    for index in forward_pass.probes:
        probe = plan.probes[index]
        keys = []
        for place in range(first_place, first_place + groups.per_micro_batch):
            direction = groups.of_place(place) * engine.config.directions + probe.direction
            keys.append(direction_key(plan.key, direction))
        probes.append(KeyedProbe(keys[0], probe.scale))
        keys_of_groups.append(tuple(keys))
    dropped = frozenset(plan.dropped_layers)
    return Perturbation(tuple(probes), dropped, engine.noise, tuple(keys_of_groups))


def estimate(
    engine: LezoEngine, plan: StepPlan, batch: StepBatch, sums: Sequence[float]
) -> StepRecord:
    """Return the record of a step, from the losses [places * probes] of all ranks.

    The step is not applied if a loss or a projected gradient is not finite.
    """
    groups = engine.groups(batch)
    losses = mean_losses_of_groups(sums, len(plan.probes), groups, batch.total_weight)
    try:
        result = engine.estimator.estimate_groups(plan.probes, losses)
    except ArithmeticError:  # an estimate that overflows counts as not finite
        result = Estimate(loss=math.nan, projected_grads=())
    return StepRecord(
        step=plan.step,
        key=plan.key,
        dropped_layers=plan.dropped_layers,
        projected_grads=result.projected_grads if result.is_finite else (),
        learning_rate=plan.learning_rate,
        perturbation_scale=plan.perturbation_scale,
        loss=result.loss if result.is_finite else None,
        applied=result.is_finite,
        layer_weights=plan.layer_weights,
    )


@dataclass(frozen=True)
class StepPlan:
    """What every rank does at a step.

    Attributes:
        step: index of the step, from 0.
        key: 64-bit key of the step's noise.
        learning_rate: of this step.
        perturbation_scale: mu.
        dropped_layers: sorted indices of the transformer blocks that are neither perturbed nor
            updated.
        layer_weights: factor of the update of each block; empty if all factors are 1.
        probes: the points at which the loss is measured, as pairs of direction and scale.
    """

    step: int
    key: int
    learning_rate: float
    perturbation_scale: float
    dropped_layers: tuple[int, ...]
    layer_weights: tuple[float, ...]
    probes: tuple[Probe, ...]


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
        num_groups: number of transformer blocks and of groups outside them.
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

    def pack(self, plan: StepPlan) -> bytes:
        """Return the bytes of a plan."""
        dropped = sum(1 << layer for layer in plan.dropped_layers)
        numbers: list[float] = []
        for probe in plan.probes:
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

    def unpack(self, data: bytes) -> StepPlan:
        """Return the plan whose bytes `pack` returned."""
        step, key, learning_rate, scale, mask, *rest = struct.unpack(self._format, data)
        dropped = int.from_bytes(mask, "little")
        numbers = rest[: 2 * self.num_probes]
        return StepPlan(
            step,
            key,
            learning_rate,
            scale,
            dropped_layers=tuple(layer for layer in range(self.num_groups) if dropped >> layer & 1),
            layer_weights=tuple(rest[2 * self.num_probes :]),
            probes=tuple(map(Probe, numbers[::2], numbers[1::2])),
        )

    @property
    def _mask_bytes(self) -> int:
        return math.ceil(self.num_groups / 8)

    @property
    def _format(self) -> str:
        num_weights = self.num_groups if self.has_weights else 0
        return f"<qQdd{self._mask_bytes}s" + "Id" * self.num_probes + "d" * num_weights
