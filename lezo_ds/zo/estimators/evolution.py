"""Evolution strategies: directions are compared with each other, and no loss at theta is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lezo_ds.zo.arithmetic import add_in_order, deviation, in_units_of
from lezo_ds.zo.estimators.base import Estimate, Estimator, Probe
from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class EvolutionStrategies(Estimator):
    """g_d = -(r_d - mean r) / s, with r_d = -l(theta + mu z_d) the reward of direction d and s its deviation.

    Source: Evolution Strategies at Scale (Qiu et al., PMLR 306, 2026, arXiv 2509.24372), with n = 30
    directions and mu = 1e-3. The authors leave out a factor of 1 / mu, which becomes part of the learning
    rate. It takes n probes, and a step sends one loss for each of them. s is the population's deviation (its
    sum of squares is divided by n). Like FZOO it is normalized descent: rewards of any scale give the same
    steps. It is meant for rewards that have no gradient; see train.objective.

    If all directions have the same reward, the gradients of the step are 0.

    Attributes:
        ranks: whether rewards are replaced by their ranks, from -1/2 to 1/2 (OpenAI's evolution strategies,
            Salimans et al. 2017); equal rewards share the mean of their ranks. An extreme reward then counts
            no more than the best one.
    """

    ranks: bool = False
    min_directions: ClassVar[int] = 2
    bias: ClassVar[str] = "the gradient, divided by about its norm (times mu, over the deviation of rewards)"

    def probes(self, records: Sequence[StepRecord]) -> tuple[Probe, ...]:
        """Return theta + mu z for each direction."""
        return tuple(Probe(direction, self.perturbation_scale) for direction in range(self.num_directions))

    def estimate(self, probes: Sequence[Probe], losses: Sequence[float]) -> Estimate:
        """Return the standard score, or the centered rank, of each loss; the loss is their mean."""
        mean = add_in_order(losses) / len(losses)
        if self.ranks:
            return Estimate(loss=mean, projected_grads=_centered_ranks(losses))
        spread = deviation(losses, degrees_of_freedom=len(losses))
        return Estimate(
            loss=mean,
            projected_grads=in_units_of(spread, [loss - mean for loss in losses]),
        )


def _centered_ranks(values: Sequence[float]) -> tuple[float, ...]:
    """Return the rank of each of two or more values, from -1/2 (the smallest) to 1/2.

    >>> _centered_ranks([3.0, 1.0, 1.0])
    (0.5, -0.25, -0.25)
    """
    ranks = []
    for value in values:
        num_below = sum(other < value for other in values)
        num_equal = sum(other == value for other in values)
        ranks.append((num_below + (num_equal - 1) / 2) / (len(values) - 1) - 0.5)
    return tuple(ranks)
