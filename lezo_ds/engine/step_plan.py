"""The plan of one step, which rank 0 decides and broadcasts in one small message."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from lezo_ds.zo.estimators import Estimator, Probe
from lezo_ds.zo.layers import LayerPolicy

NUM_FACT_NUMBERS = 4
"""Number of values in the all-reduce that prove that all ranks agree (see `agreement.fact_numbers`)."""
_NUM_SHARE_NUMBERS = 1  # see `agreement.share_number`
_NUM_VOTES = 2  # one to stop, one to take a snapshot

_HEAD = struct.Struct("<qQdd")
_PROBE = struct.Struct("<Id")
_WEIGHT = struct.Struct("<d")


@dataclass(frozen=True)
class StepPlan:
    """What every rank does at a step (LeZO, Algorithm 1, line 3).

    Attributes:
        step: index of the step, from 0.
        key: key of the step's noise, 64 bits.
        learning_rate: eta of the update.
        perturbation_scale: mu of the paper, "eps" in its tables.
        dropped_layers: sorted indices of the transformer blocks that are neither perturbed nor updated.
        layer_weights: factor of the update of each block; empty if all factors are 1.
        probes: the points at which the loss is measured.
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
    """The binary format of a run's plans. All ranks know it, so no message has to announce its length.

    Attributes:
        num_layers: number of transformer blocks of the model.
        num_probes: number of probes of a step.
        has_weights: whether plans have layer weights.
    """

    num_layers: int
    num_probes: int
    has_weights: bool = False

    @property
    def num_bytes(self) -> int:
        """Length of the message, in bytes.

        >>> PlanFormat(num_layers=40, num_probes=2).num_bytes
        61
        """
        weights = _WEIGHT.size * self.num_layers if self.has_weights else 0
        return _HEAD.size + self._mask_bytes + _PROBE.size * self.num_probes + weights

    def pack(self, plan: StepPlan) -> bytes:
        """Return a plan as `num_bytes` bytes."""
        mask = sum(1 << layer for layer in plan.dropped_layers).to_bytes(self._mask_bytes, "little")
        parts = [_HEAD.pack(plan.step, plan.key, plan.learning_rate, plan.perturbation_scale), mask]
        parts += [_PROBE.pack(probe.direction, probe.scale) for probe in plan.probes]
        parts += [_WEIGHT.pack(weight) for weight in plan.layer_weights]
        return b"".join(parts)

    def unpack(self, data: bytes) -> StepPlan:
        """Return the plan that `pack` made `data` from."""
        step, key, learning_rate, perturbation_scale = _HEAD.unpack_from(data)
        mask_end = _HEAD.size + self._mask_bytes
        mask = int.from_bytes(data[_HEAD.size : mask_end], "little")
        probes_end = mask_end + _PROBE.size * self.num_probes
        return StepPlan(
            step=step,
            key=key,
            learning_rate=learning_rate,
            perturbation_scale=perturbation_scale,
            dropped_layers=tuple(layer for layer in range(self.num_layers) if mask >> layer & 1),
            layer_weights=tuple(weight for (weight,) in _WEIGHT.iter_unpack(data[probes_end:])),
            probes=tuple(Probe(*fields) for fields in _PROBE.iter_unpack(data[mask_end:probes_end])),
        )

    @property
    def _mask_bytes(self) -> int:
        return -(-self.num_layers // 8)


def plan_format_of(estimator: Estimator, layer_policy: LayerPolicy) -> PlanFormat:
    """Return the format of the plans of a run with this estimator and layer policy."""
    return PlanFormat(
        num_layers=layer_policy.num_layers,
        num_probes=estimator.num_probes,
        has_weights=layer_policy.has_weights,
    )


def scalar_bytes(plan_format: PlanFormat, num_micro_batches: int) -> int:
    """Return the bytes of everything that a step communicates besides gathered weights.

    These are the plan and one all-reduce of float64 numbers: a loss for each probe of each micro-batch, the
    votes, and the proof that all ranks agree.

    Args:
        plan_format: format of the run's plans.
        num_micro_batches: number of micro-batches of a step on all ranks together.

    >>> scalar_bytes(PlanFormat(num_layers=40, num_probes=2), num_micro_batches=1)
    133
    """
    num_losses = plan_format.num_probes * num_micro_batches
    return plan_format.num_bytes + 8 * (num_losses + _NUM_VOTES + NUM_FACT_NUMBERS + _NUM_SHARE_NUMBERS)
