"""The record of a step: what the journal keeps, and all that replaying the step needs."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepPlan:
    """What rank 0 decides of a step, apart from its probes.

    Attributes:
        step: index from 0. The weights after it have seen step + 1 steps.
        key: key of the step's noise, 0 to 2**64 - 1.
        dropped_layers: sorted indices of the groups of layers that are neither perturbed nor
            updated: blocks from 0, then the groups outside them (see
            `layers.LayerPolicy.num_groups`).
        learning_rate: eta of this step, after warm-up and schedule.
        perturbation_scale: mu.
        layer_weights: factor of the update of each group of layers; empty if all are 1.
    """

    step: int
    key: int
    dropped_layers: tuple[int, ...]
    learning_rate: float
    perturbation_scale: float
    layer_weights: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepRecord(StepPlan):
    """One zeroth-order step, as every rank knows it and the journal keeps it: plan and result.

    Construction raises ValueError if a number is not finite or out of range, so that a damaged
    journal cannot change weights.

    Attributes:
        projected_grads: the estimate of the derivative along each direction. A skipped step may
            have none.
        loss: mean over the batch; None if it was not finite.
        applied: False if the step was skipped, because a loss or a projected gradient was not
            finite.
    """

    projected_grads: tuple[float, ...]
    loss: float | None = None
    applied: bool = True

    def __post_init__(self) -> None:
        for number in (self.step, self.key, *self.dropped_layers):
            # Not isinstance: True is an int, too.
            if type(number) is not int or not 0 <= number < 2**64:
                raise ValueError(f"{number!r} is not an unsigned 64-bit number")
        if self.loss is not None:
            check_finite(self.loss)
        check_finite(self.learning_rate, self.perturbation_scale)
        check_finite(*self.projected_grads, *self.layer_weights)
        if not isinstance(self.applied, bool):
            raise ValueError(f"applied is {self.applied!r}, neither true nor false")
        if self.applied and (self.loss is None or not self.projected_grads):
            raise ValueError(
                "an applied step has a finite loss and at least one projected gradient"
            )


def check_finite(*values: float) -> None:
    """Raise ValueError unless every value is a finite number."""
    for value in values:
        # Not isinstance alone: True is an int, too.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
