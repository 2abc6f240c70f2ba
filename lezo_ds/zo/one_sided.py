"""Estimators that probe one side of each direction: forward differences, FZOO and evolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lezo_ds.zo.estimators import ESTIMATORS, Estimate, Estimator, Probe, add_in_order
from lezo_ds.zo.records import StepRecord


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
class Fzoo(OneSided):
    """g_d = (l(theta + mu z_d) - l(theta)) / s for each direction z_d.

    s is the sample deviation of the losses l(theta + mu z_d). It is about mu times the norm of
    the gradient, so this is normalized descent, and mu cancels out. With fewer than 4 directions,
    the square of 1 / s has no finite mean (for normal losses). Groups of examples share one s, the
    deviation of the losses from the mean of their group: if each had its own, an example to which
    no direction matters would weigh as much as the others.

    Source: FZOO (Dang et al., ICLR 2026, arXiv 2506.09034), which draws z from {-1, +1}.
    """

    min_directions: ClassVar[int] = 4

    def estimate(self, probes: Sequence[Probe], losses: Sequence[float]) -> Estimate:
        return self.estimate_groups(probes, [losses])

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
class EvolutionStrategies(Estimator):
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

    def estimate(self, probes: Sequence[Probe], losses: Sequence[float]) -> Estimate:
        return self.estimate_groups(probes, [losses])

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


ESTIMATORS.add("one-sided", OneSided)
ESTIMATORS.add("fzoo", Fzoo)
ESTIMATORS.add("evolution-strategies", EvolutionStrategies)


def deviation(values: Sequence[float], degrees_of_freedom: int) -> float:
    """Return the standard deviation, with the same bits on every machine.

    It is NaN if a value is not finite, and exactly 0 if all values are equal.
    """
    return root_mean_square(centered(values), degrees_of_freedom)


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
