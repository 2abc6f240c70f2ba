"""One-sided differences: all directions share the loss at theta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lezo_ds.zo.estimators.base import Estimate, Estimator, Probe
from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class OneSided(Estimator):
    """g = (l(theta + mu z) - l(theta)) / mu for each direction z: n + 1 probes where SPSA has 2 n.

    Source: forward differences; see Spall 1992 and ZO-LLM (Zhang et al. 2024), where it costs half the
    forward passes. Like SPSA it is unbiased for the gradient of the loss smoothed by the noise, but its
    error of the slope along a direction is of order mu, not mu^2.
    """

    def probes(self, records: Sequence[StepRecord]) -> tuple[Probe, ...]:
        """Return theta itself, and theta + mu z for each direction."""
        sides = (Probe(direction, self.perturbation_scale) for direction in range(self.num_directions))
        return Probe(direction=0, scale=0.0), *sides

    def estimate(self, probes: Sequence[Probe], losses: Sequence[float]) -> Estimate:
        """Return the slope from theta to each direction's side; the loss is the one at theta."""
        base, *sides = losses
        return Estimate(
            loss=base,
            projected_grads=tuple((side - base) / self.perturbation_scale for side in sides),
        )
