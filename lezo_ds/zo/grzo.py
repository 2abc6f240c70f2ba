"""GRZO: the slopes of a step in units of their own deviation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lezo_ds.zo.estimators import ESTIMATORS, Estimate, Probe, Spsa, add_in_order
from lezo_ds.zo.one_sided import deviation, in_units_of


@dataclass(frozen=True)
class Grzo(Spsa):
    """g_d = delta_d / s with delta_d = l(theta + mu z_d) - l(theta - mu z_d), for each direction.

    s is the sample deviation of delta over all directions of the step, those of all groups of
    examples together. The step needs at least two directions. As in FZOO, mu cancels out.

    Source: GRZO (arXiv 2606.02857), which gives each example a direction of its own
    (zo.examples_per_direction=1).
    """

    min_directions_of_step: ClassVar[int] = 2

    def estimate(self, probes: Sequence[Probe], losses: Sequence[float]) -> Estimate:
        return self.estimate_groups(probes, [losses])

    def estimate_groups(
        self, probes: Sequence[Probe], losses: Sequence[Sequence[float]]
    ) -> Estimate:
        centers = []
        slopes: list[float] = []
        for of_group in losses:
            estimate = super().estimate(probes, of_group)
            centers.append(estimate.loss)
            slopes += estimate.projected_grads
        spread = deviation(slopes, degrees_of_freedom=len(slopes) - 1)
        return Estimate(add_in_order(centers) / len(centers), in_units_of(spread, slopes))


ESTIMATORS.add("grzo", Grzo)
