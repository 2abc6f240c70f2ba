"""One step of zeroth-order training on all ranks: LeZO (Wang et al. 2024), Algorithm 1, and its relatives."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.forward.batch import LossFunction, StepBatch, to_device
from lezo_ds.forward.perturbed_forward import KeyedProbe, Perturbation
from lezo_ds.zo.estimators import Estimate, Probe, mean_losses
from lezo_ds.zo.keys import direction_key, step_key
from lezo_ds.zo.passes import Pass
from lezo_ds.zo.records import StepRecord

if TYPE_CHECKING:
    from lezo_ds.engine import LezoEngine


def train_batch(engine: LezoEngine, batch: StepBatch, loss_function: LossFunction) -> StepRecord:
    """Do one step. `LezoEngine.train_batch` describes arguments, result and errors."""
    # Line 3: rank 0 drops layers, chooses the seed of the noise and the probes, and broadcasts this plan.
    message = engine.plan_format.pack(decide(engine)) if engine.global_rank == 0 else b""
    plan = engine.plan_format.unpack(
        distributed.broadcast_bytes(message, engine.plan_format.num_bytes)
    )
    # Lines 4 to 6: this rank's share of the losses at theta + mu z and theta - mu z. theta itself stays.
    losses = forward(engine, plan, batch, loss_function)
    # One all-reduce gives every loss to every rank, and proves that all work on the same plan and batch.
    sums = engine.reduce_and_agree(losses, batch, {"plan": repr(plan)})
    # Line 7: the projected gradients.
    record = estimate(engine, plan, batch, sums)
    # The journal comes first, as in any write-ahead log. Weights in memory are gone after a power cut, so
    # they need not wait for the disk: only what is on a disk must never be ahead of the journal.
    engine.write_ahead(record)
    # Line 8: each rank updates its own shards.
    engine.apply(record.step, record.step + 1)
    return record


def decide(engine: LezoEngine) -> StepPlan:
    """Return the plan of the next step, a function of the run's seed and of its records so far."""
    layers = engine.layer_policy.sample(engine.seed, engine.records)
    return StepPlan(
        step=engine.global_steps,
        key=step_key(engine.seed, engine.global_steps),
        learning_rate=engine.learning_rates.at(engine.global_steps),
        perturbation_scale=engine.config.perturbation_scale,
        dropped_layers=layers.dropped,
        layer_weights=layers.weights,
        probes=tuple(engine.estimator.probes(engine.records)),
    )


def forward(
    engine: LezoEngine, plan: StepPlan, batch: StepBatch, loss_function: LossFunction
) -> Tensor:
    """Return float64 [micro-batches * probes]: the losses of this rank's passes, and 0 for all others."""
    num_probes = len(plan.probes)
    losses = torch.zeros(len(batch) * num_probes, dtype=torch.float64, device=engine.device)
    passes = engine.passes_of_rank(engine.global_rank, len(batch))
    # All inputs are copied before the first pass, because a copy from the host waits for queued GPU work.
    inputs = {
        index: to_device(batch[index], engine.device)
        for index in {one.micro_batch for one in passes}
    }
    for one in passes:
        outputs = engine.run(inputs[one.micro_batch], perturbation(engine, plan, one))
        for probe, output in zip(one.probes, outputs, strict=True):
            loss = loss_function(output, inputs[one.micro_batch]).double().sum()
            if one.counts:
                losses[one.micro_batch * num_probes + probe] = loss
    return losses


def perturbation(engine: LezoEngine, plan: StepPlan, one: Pass) -> Perturbation:
    probes = (plan.probes[index] for index in one.probes)
    keyed = tuple(
        KeyedProbe(direction_key(plan.key, probe.direction), probe.scale) for probe in probes
    )
    return Perturbation(keyed, frozenset(plan.dropped_layers), engine.law)


def estimate(
    engine: LezoEngine, plan: StepPlan, batch: StepBatch, sums: Sequence[float]
) -> StepRecord:
    """Return the record of a step. It is not applied if a loss or a projected gradient is not finite."""
    losses = mean_losses(sums, len(plan.probes), batch.total_weight)
    try:
        result = engine.estimator.estimate(plan.probes, losses)
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
    """What every rank does at a step."""

    step: int
    key: int
    """64-bit key of the step's noise."""
    learning_rate: float
    perturbation_scale: float
    dropped_layers: tuple[int, ...]
    """Sorted indices of the transformer blocks that are neither perturbed nor updated."""
    layer_weights: tuple[float, ...]
    """Factor of the update of each block; empty if all factors are 1."""
    probes: tuple[Probe, ...]


@dataclass(frozen=True)
class PlanFormat:
    """The bytes of a run's plans. All ranks know their number, so no message has to announce its length.

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
        mask = sum(1 << layer for layer in plan.dropped_layers).to_bytes(self._mask_bytes, "little")
        head = (plan.step, plan.key, plan.learning_rate, plan.perturbation_scale, mask)
        probes = (number for probe in plan.probes for number in (probe.direction, probe.scale))
        return struct.pack(self._format, *head, *probes, *plan.layer_weights)

    def unpack(self, data: bytes) -> StepPlan:
        step, key, learning_rate, scale, mask, *rest = struct.unpack(self._format, data)
        dropped = int.from_bytes(mask, "little")
        numbers = rest[: 2 * self.num_probes]
        return StepPlan(
            step=step,
            key=key,
            learning_rate=learning_rate,
            perturbation_scale=scale,
            dropped_layers=tuple(layer for layer in range(self.num_groups) if dropped >> layer & 1),
            layer_weights=tuple(rest[2 * self.num_probes :]),
            probes=tuple(Probe(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)),
        )

    @property
    def _mask_bytes(self) -> int:
        return -(-self.num_groups // 8)

    @property
    def _format(self) -> str:
        weights = self.num_groups if self.has_weights else 0
        return f"<qQdd{self._mask_bytes}s" + "Id" * self.num_probes + "d" * weights
