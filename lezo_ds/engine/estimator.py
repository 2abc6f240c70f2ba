"""The projected gradient from the losses of a step (MeZO; LeZO, Algorithm 1, line 7)."""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

OUTLIER_WINDOW = 100
"""Number of steps whose projected gradients say what an ordinary one is."""

_FEWEST = 20  # of fewer, the median says little


@dataclass(frozen=True)
class Estimate:
    """Both losses of a step and what follows from them.

    Attributes:
        loss_plus: mean loss at theta + mu z.
        loss_minus: mean loss at theta - mu z.
        projected_gradient: (loss_plus - loss_minus) / (2 mu), the derivative along z.
    """

    loss_plus: float
    loss_minus: float
    projected_gradient: float

    @property
    def loss(self) -> float:
        """Mean of both losses: the loss at theta up to second order in mu."""
        return (self.loss_plus + self.loss_minus) / 2

    @property
    def is_finite(self) -> bool:
        """Whether the step may be applied."""
        return math.isfinite(self.projected_gradient)


def estimate(
    plus_sums: Sequence[float], minus_sums: Sequence[float], total_weight: float, perturbation_scale: float
) -> Estimate:
    """Combine the summed losses of a step's micro-batches, in micro-batch order.

    The order of the sum is fixed and the arithmetic is float64, so every rank, and any number of ranks,
    gets the same bits.

    Args:
        plus_sums: summed loss of each micro-batch at theta + mu z.
        minus_sums: the same at theta - mu z.
        total_weight: number of terms of the mean loss over all micro-batches, > 0.
        perturbation_scale: mu, > 0.
    """
    loss_plus = _sum_in_order(plus_sums) / total_weight
    loss_minus = _sum_in_order(minus_sums) / total_weight
    return Estimate(loss_plus, loss_minus, (loss_plus - loss_minus) / (2 * perturbation_scale))


def is_outlier(magnitude: float, recent: Collection[float], factor: float | None) -> bool:
    """Return whether a step is to be skipped as its projected gradient is out of all proportion.

    Args:
        magnitude: greatest absolute value of the step's projected gradients.
        recent: the same of the last applied steps, at most OUTLIER_WINDOW; of fewer than 20, none is.
        factor: how many times their median is too much, above 1; None for no limit.

    >>> is_outlier(5.0, [1.0] * 20, factor=4), is_outlier(5.0, [2.0] * 20, factor=4)
    (True, False)
    """
    return factor is not None and len(recent) >= _FEWEST and magnitude > factor * statistics.median(recent)


def _sum_in_order(values: Sequence[float]) -> float:
    # Not sum(): from Python 3.12 on it compensates for rounding, which gives other bits than before.
    return functools.reduce(operator.add, values, 0.0)
