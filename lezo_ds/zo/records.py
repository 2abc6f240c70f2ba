"""The record of a step: what the journal keeps, and all that replaying the step needs."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """One zeroth-order step. Construction raises ValueError if a number is not finite or out of range."""

    step: int
    """Index from 0. The weights after it have seen step + 1 steps."""
    key: int
    """Key of the step's noise, 0 to 2**64 - 1."""
    dropped_layers: tuple[int, ...]
    """Sorted indices of the blocks (or groups outside them) that were neither perturbed nor updated."""
    projected_grads: tuple[float, ...]
    """The estimate of the derivative along each direction."""
    learning_rate: float
    perturbation_scale: float
    loss: float | None = None
    """Mean over the batch; None if it was not finite."""
    applied: bool = True
    """False if the step was skipped, because a loss or a projected gradient was not finite."""
    layer_weights: tuple[float, ...] = ()
    """Factor of the update of each block and group outside; empty if all are 1."""

    def __post_init__(self) -> None:
        for number in (self.step, self.key, *self.dropped_layers):
            if type(number) is not int or not 0 <= number < 2**64:
                raise ValueError(f"{number!r} is not an unsigned 64-bit number")
        loss = () if self.loss is None else (self.loss,)
        check_finite(self.learning_rate, self.perturbation_scale, *loss)
        check_finite(*self.projected_grads, *self.layer_weights)
        if self.applied and (self.loss is None or not self.projected_grads):
            raise ValueError(
                "an applied step has a finite loss and at least one projected gradient"
            )


def check_finite(*values: float) -> None:
    """Raise ValueError unless every value is a finite number."""
    for value in values:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{value!r} is not a finite number")
