"""Two-sided simultaneous perturbation: MeZO's and LeZO's own estimator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lezo_ds.zo.arithmetic import add_in_order
from lezo_ds.zo.estimators.base import Estimate, Estimator, Probe
from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class Spsa(Estimator):
    """g = (l(theta + mu z) - l(theta - mu z)) / (2 mu) for each direction z.

    Source: Spall 1992; MeZO (Malladi et al. 2023, Algorithm 1); LeZO (Wang et al. 2024, Algorithm 1, line 7).
    It is unbiased for the gradient of the loss smoothed by the noise; the reported loss is the mean of
    both sides, which is the loss at theta up to second order in mu.
    """

    def probes(self, records: Sequence[StepRecord]) -> tuple[Probe, ...]:
        """Return theta + mu z and theta - mu z for each direction in turn."""
        scales = (self.perturbation_scale, -self.perturbation_scale)
        return tuple(Probe(direction, scale) for direction in range(self.num_directions) for scale in scales)

    def estimate(self, probes: Sequence[Probe], losses: Sequence[float]) -> Estimate:
        """Return the slope between the two sides of each direction."""
        sides = list(zip(losses[::2], losses[1::2], strict=True))
        return Estimate(
            loss=add_in_order([(plus + minus) / 2 for plus, minus in sides]) / self.num_directions,
            projected_grads=tuple((plus - minus) / (2 * self.perturbation_scale) for plus, minus in sides),
        )
