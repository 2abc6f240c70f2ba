"""Estimators: the probes of a step, and the projected gradients that their losses give.

To add one: a subclass of `Estimator` here and a line at the end, or
`zo.estimator: package.module:Name`.
"""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lezo_ds.errors import UserError
from lezo_ds.registry import Registry
from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class Probe:
    """A point at which the loss is measured: theta + scale * z of a direction.

    Attributes:
        direction: index of the direction in the step.
        scale: fp64; 0 for theta itself, whatever the direction.
    """

    direction: int
    scale: float


@dataclass(frozen=True)
class Estimate:
    """What the losses of a step say.

    Attributes:
        loss: an estimate of the mean loss at theta.
        projected_grads: an estimate of the derivative along each direction, in order.
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

    Fields that a subclass adds are its options, `zo.estimator_options`; each has a default.

    Attributes:
        perturbation_scale: mu > 0; "eps" in the tables of MeZO and LeZO.
        num_directions: number of directions of a step, at least `min_directions`.
        min_directions: the smallest number of directions that the estimator works with.
        min_directions_of_step: that of all groups of examples together.
    """

    perturbation_scale: float
    num_directions: int = 1
    min_directions: ClassVar[int] = 1
    min_directions_of_step: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.num_directions < self.min_directions:
            raise UserError(
                f"zo.directions={self.num_directions} is too few: this estimator needs "
                f"{self.min_directions}",
                fix="set zo.directions=8",
            )

    @abstractmethod
    def probes(self, records: Sequence[StepRecord]) -> tuple[Probe, ...]:
        """Return the probes of the step after `records`. Their number is the same for all steps."""

    @abstractmethod
    def estimate(self, probes: Sequence[Probe], losses: Sequence[float]) -> Estimate:
        """Return what the losses say.

        Args:
            probes: what `probes` returned for this step.
            losses: the mean loss over the batch at each probe. It may be infinite or NaN.

        Raises:
            ArithmeticError: the losses cannot be read (for example, a division by zero). The step
                is skipped.
        """

    def estimate_groups(
        self, probes: Sequence[Probe], losses: Sequence[Sequence[float]]
    ) -> Estimate:
        """Return what the losses say if each group of examples has directions of its own.

        By default, each group is estimated as if it were a batch.

        Args:
            probes: what `probes` returned for this step.
            losses: the mean loss over group g of the batch at probe p, as losses[g][p].

        Returns:
            The mean loss of the groups, and the projected gradients of the directions of group 0,
            then those of group 1, ...

        Raises:
            ArithmeticError: as `estimate`.
        """
        estimates = [self.estimate(probes, of_group) for of_group in losses]
        gradients: list[float] = []
        for estimate in estimates:
            gradients += estimate.projected_grads
        loss = add_in_order([estimate.loss for estimate in estimates]) / len(estimates)
        return Estimate(loss, tuple(gradients))

    def check_groups(self, num_groups: int) -> None:
        """Refuse a number of groups of examples that have too few directions together."""
        if num_groups * self.num_directions < self.min_directions_of_step:
            raise UserError(
                f"zo.estimator={type(self).__name__.lower()} compares directions with each other, "
                "and this step has one",
                fix="set zo.noise_rank=1 zo.examples_per_direction=1, or zo.directions=8",
            )

    @property
    def num_probes(self) -> int:
        return len(self.probes(()))


@dataclass(frozen=True)
class Spsa(Estimator):
    """g = (l(theta + mu z) - l(theta - mu z)) / (2 mu) for each direction z.

    It is unbiased for the gradient of the loss smoothed by the noise. The reported loss is the mean
    of both sides, which is the loss at theta up to second order in mu.

    Source: Spall 1992; MeZO (Malladi et al. 2023, Algorithm 1); LeZO (Wang et al. 2024,
    Algorithm 1, line 7).
    """

    def probes(self, records: Sequence[StepRecord]) -> tuple[Probe, ...]:
        probes = []
        for direction in range(self.num_directions):
            # Opposite scales side by side share one draw of z (see `DenseDirections.perturb`).
            probes.append(Probe(direction, self.perturbation_scale))
            probes.append(Probe(direction, -self.perturbation_scale))
        return tuple(probes)

    def estimate(self, probes: Sequence[Probe], losses: Sequence[float]) -> Estimate:
        centers = []
        gradients = []
        for plus, minus in zip(losses[::2], losses[1::2], strict=True):
            centers.append((plus + minus) / 2)
            gradients.append((plus - minus) / (2 * self.perturbation_scale))
        return Estimate(
            loss=add_in_order(centers) / self.num_directions,
            projected_grads=tuple(gradients),
        )


ESTIMATORS: Registry[type[Estimator]] = Registry("estimator", "zo.estimator", kind=Estimator)
ESTIMATORS.add("spsa", Spsa)


def mean_losses(sums: Sequence[float], num_probes: int, total_weight: float) -> list[float]:
    """Return the mean loss at each probe, with the same bits on any number of ranks.

    Args:
        sums: the summed losses of micro-batch 0 at each probe, then those of micro-batch 1, ...
        num_probes: number of probes of the step.
        total_weight: what the sum of these losses is divided by, such as a number of examples.
    """
    return [add_in_order(sums[probe::num_probes]) / total_weight for probe in range(num_probes)]


def add_in_order(values: Sequence[float]) -> float:
    """Return the sum, rounded after every addition.

    The built-in `sum` compensates for rounding from Python 3.12 on, which gives other bits.
    """
    return functools.reduce(operator.add, values, 0.0)
