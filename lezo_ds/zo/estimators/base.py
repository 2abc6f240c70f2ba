"""What an estimator is: probes of theta, and the projected gradients that their losses give."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lezo_ds.zo.arithmetic import add_in_order
from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class Probe:
    """A point at which the loss is measured: theta + scale * z, or theta itself if the scale is 0.

    Attributes:
        direction: index of the direction z within the step, from 0.
        scale: signed distance along it.
    """

    direction: int
    scale: float


@dataclass(frozen=True)
class Estimate:
    """What the losses of a step's probes say.

    Attributes:
        loss: an estimate of the loss at theta.
        projected_grads: one number for each direction; the update is proportional to their mean over
            the directions, each multiplied with its z.
    """

    loss: float
    projected_grads: tuple[float, ...]

    @property
    def is_finite(self) -> bool:
        """Whether the step may be applied."""
        return math.isfinite(self.loss) and all(map(math.isfinite, self.projected_grads))


@dataclass(frozen=True)
class Estimator(ABC):
    """Chooses the probes of a step and reads their losses. A pure function of its arguments.

    Attributes:
        perturbation_scale: mu, > 0; "eps" in the tables of MeZO and LeZO.
        num_directions: number of directions of a step, at least `min_directions`.
        min_directions: the smallest number of directions that the estimator works with.
        bias: how the expectation of the estimate differs from the gradient, up to terms of order mu^2;
            empty if it does not.
    """

    perturbation_scale: float
    num_directions: int = 1
    min_directions: ClassVar[int] = 1
    bias: ClassVar[str] = ""

    @abstractmethod
    def probes(self, records: Sequence[StepRecord]) -> tuple[Probe, ...]:
        """Return the probes of the next step; their number is always the same.

        Args:
            records: of all steps so far.
        """

    @abstractmethod
    def estimate(self, probes: Sequence[Probe], losses: Sequence[float]) -> Estimate:
        """Return what the losses of the probes say.

        Args:
            probes: what `probes` returned for this step.
            losses: the mean loss over the batch at each probe; a loss may be infinite or not a number.

        Raises:
            ArithmeticError: the losses cannot be read (for example, a division by zero); the step is
                skipped.
        """

    @property
    def num_probes(self) -> int:
        """Number of probes of a step."""
        return len(self.probes(()))


def mean_losses(sums: Sequence[float], num_probes: int, total_weight: float) -> list[float]:
    """Return the mean loss over the batch at each probe.

    The order of the sum is fixed and the arithmetic is float64, so that every rank, and any number of
    ranks, gets the same bits.

    Args:
        sums: summed losses of micro-batch 0 at each probe, then those of micro-batch 1, and so on.
        num_probes: of the step.
        total_weight: number of terms of the mean loss over all micro-batches, > 0.
    """
    return [add_in_order(sums[probe::num_probes]) / total_weight for probe in range(num_probes)]
