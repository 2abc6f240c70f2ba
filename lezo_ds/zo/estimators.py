"""Estimators: the probes of a step, and the projected gradients that their losses give.

To add one: a subclass of `Estimator` here and a line after the last one, or
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
from lezo_ds.user_code import shown
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
            gradients.extend(estimate.projected_grads)  # += would add to an array of NumPy's
        loss = add_in_order([estimate.loss for estimate in estimates]) / len(estimates)
        return Estimate(loss, tuple(gradients))

    def check_groups(self, num_groups: int) -> None:
        """Refuse a number of groups of examples that have too few directions together."""
        if num_groups * self.num_directions < self.min_directions_of_step:
            raise UserError(
                f"zo.estimator={type(self).__name__.lower()} compares directions with each other, "
                "and this step has only one",
                fix="set zo.noise_rank=1 zo.examples_per_direction=1, or zo.directions=8",
            )

    def checked_probes(self, records: Sequence[StepRecord]) -> tuple[Probe, ...]:
        """Return the probes of the step, which a user-defined estimator may get wrong.

        Raises:
            UserError: there are none, or one of them is not a probe of a direction of the step.
        """
        probes = tuple(self.probes(records))
        directions = range(self.num_directions)

        def fits(probe: Probe) -> bool:
            is_finite = isinstance(probe, Probe) and math.isfinite(probe.scale)
            return is_finite and probe.direction in directions

        if not (probes and all(map(fits, probes))):
            raise UserError(
                f"{type(self).__name__} returned the probes {shown(probes)}, and the step has the "
                f"directions 0 to {self.num_directions - 1}",
                fix="return lezo_ds.zo.estimators.Probe with one of these and a finite scale",
            )
        return probes

    @property
    def num_probes(self) -> int:
        return len(self.checked_probes(()))


class JointEstimator(Estimator):
    """Estimates the groups of examples of a step together, not each as if it were a batch."""

    def estimate(self, probes: Sequence[Probe], losses: Sequence[float]) -> Estimate:
        return self.estimate_groups(probes, [losses])


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


@dataclass(frozen=True)
class Grzo(JointEstimator, Spsa):
    """g_d = delta_d / s with delta_d = l(theta + mu z_d) - l(theta - mu z_d), for each direction.

    s is the sample deviation of delta over all directions of the step, those of all groups of
    examples together. The step needs at least two directions. As in FZOO, mu cancels out.

    Source: GRZO (arXiv 2606.02857), which gives each example a direction of its own
    (zo.examples_per_direction=1).
    """

    min_directions_of_step: ClassVar[int] = 2

    def estimate_groups(
        self, probes: Sequence[Probe], losses: Sequence[Sequence[float]]
    ) -> Estimate:
        centers = []
        slopes: list[float] = []
        for of_group in losses:
            estimate = Spsa.estimate(self, probes, of_group)
            centers.append(estimate.loss)
            slopes += estimate.projected_grads
        spread = root_mean_square(centered(slopes), degrees_of_freedom=len(slopes) - 1)
        return Estimate(add_in_order(centers) / len(centers), in_units_of(spread, slopes))


@dataclass(frozen=True)
class OneSided(Estimator):
    """g = (l(theta + mu z) - l(theta)) / mu for each direction z: n + 1 probes where SPSA has 2 n.

    The error of the slope is of order mu, not mu^2. The first probe is theta itself.

    Source: forward differences (Spall 1992).
    """

    def probes(self, records: Sequence[StepRecord]) -> tuple[Probe, ...]:
        return (Probe(direction=0, scale=0.0), *_one_side(self))

    def estimate(self, probes: Sequence[Probe], losses: Sequence[float]) -> Estimate:
        base, *sides = losses
        gradients = [(side - base) / self.perturbation_scale for side in sides]
        return Estimate(base, tuple(gradients))


@dataclass(frozen=True)
class Fzoo(JointEstimator, OneSided):
    """g_d = (l(theta + mu z_d) - l(theta)) / s for each direction z_d.

    s is the sample deviation of the losses l(theta + mu z_d). It is about mu times the norm of
    the gradient, so this is normalized descent, and mu cancels out. With fewer than 4 directions,
    the square of 1 / s has no finite mean (for normal losses). Groups of examples share one s, the
    deviation of the losses from the mean of their group: if each had its own, an example to which
    no direction matters would weigh as much as the others.

    Source: FZOO (Dang et al., ICLR 2026, arXiv 2506.09034), which draws z from {-1, +1}.
    """

    min_directions: ClassVar[int] = 4

    def estimate_groups(
        self, probes: Sequence[Probe], losses: Sequence[Sequence[float]]
    ) -> Estimate:
        bases: list[float] = []
        differences: list[float] = []
        from_means: list[float] = []
        for base, *sides in losses:
            bases.append(base)
            differences += [side - base for side in sides]
            from_means += centered(sides)
        # Each group has lost a degree of freedom to its mean.
        spread = root_mean_square(from_means, degrees_of_freedom=len(from_means) - len(losses))
        return Estimate(add_in_order(bases) / len(bases), in_units_of(spread, differences))


@dataclass(frozen=True)
class EvolutionStrategies(JointEstimator):
    """g_d = -(r_d - mean r) / s, with r_d = -l(theta + mu z_d) the reward of direction d.

    s is the population's deviation of the rewards, and the factor 1 / mu is part of the learning
    rate. It is meant for rewards, which need no gradient. Rewards of any scale give the same steps.
    With groups of examples, each has its own mean, and all share one s: if each had its own, those
    to which no direction matters would weigh as much as the others.

    Source: Evolution Strategies at Scale (Qiu et al., PMLR 306, 2026, arXiv 2509.24372), with
    n = 30 directions and mu = 1e-3.
    """

    min_directions: ClassVar[int] = 2

    def probes(self, records: Sequence[StepRecord]) -> tuple[Probe, ...]:
        return tuple(_one_side(self))

    def estimate_groups(
        self, probes: Sequence[Probe], losses: Sequence[Sequence[float]]
    ) -> Estimate:
        means = [add_in_order(of_group) / len(of_group) for of_group in losses]
        center = add_in_order(means) / len(means)
        differences: list[float] = []
        for of_group in losses:
            # A loss above the mean is a reward below it: the two signs of the formula cancel.
            differences += centered(of_group)
        spread = root_mean_square(differences, degrees_of_freedom=len(differences))
        return Estimate(center, in_units_of(spread, differences))


ESTIMATORS: Registry[type[Estimator]] = Registry("estimator", "zo.estimator", kind=Estimator)
ESTIMATORS.add("spsa", Spsa)
ESTIMATORS.add("one-sided", OneSided)
ESTIMATORS.add("fzoo", Fzoo)
ESTIMATORS.add("evolution-strategies", EvolutionStrategies)
ESTIMATORS.add("grzo", Grzo)


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


def centered(values: Sequence[float]) -> list[float]:
    """Return the differences from the mean: exactly 0 if all values are equal."""
    if all(value == values[0] for value in values) and math.isfinite(values[0]):
        # The mean of equal values may be rounded to another value, and then no difference is 0.
        return [0.0] * len(values)
    mean = add_in_order(values) / len(values)
    return [value - mean for value in values]


def root_mean_square(differences: Sequence[float], degrees_of_freedom: int) -> float:
    """Return the root of the sum of squares over the degrees of freedom."""
    squares = [difference * difference for difference in differences]
    return math.sqrt(add_in_order(squares) / degrees_of_freedom)


def _one_side(estimator: Estimator) -> list[Probe]:
    scale = estimator.perturbation_scale
    return [Probe(direction, scale) for direction in range(estimator.num_directions)]


def in_units_of(spread: float, values: Sequence[float]) -> tuple[float, ...]:
    """Return values / spread, or zeros if the spread is 0: equal losses favor no direction."""
    if spread == 0:
        return (0.0,) * len(values)
    return tuple(value / spread for value in values)
