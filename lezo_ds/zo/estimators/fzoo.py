"""FZOO: one-sided differences in units of the deviation of the losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lezo_ds.zo.arithmetic import deviation, in_units_of
from lezo_ds.zo.estimators.base import Estimate, Probe
from lezo_ds.zo.estimators.one_sided import OneSided


@dataclass(frozen=True)
class Fzoo(OneSided):
    """g_d = (l(theta + mu z_d) - l(theta)) / s, with s the standard deviation of the l(theta + mu z_d).

    Source: FZOO (Dang et al., ICLR 2026, arXiv 2506.09034), which draws z from {-1, +1}. It takes n + 1
    probes, and a step sends one loss for each of them. s is the sample deviation (its sum of squares is
    divided by n - 1). It is about mu times the norm of the gradient, so the step has about the same length
    wherever the gradient is small or large: this is normalized descent, and its learning rate is larger than
    that of `one-sided` by the norm of the gradient. mu cancels out.

    If all directions have the same loss, s is 0 and says nothing; all gradients of the step are then 0. The s
    of few directions is often close to 0: with fewer than 4, the square of 1 / s has no finite mean (as of
    normal losses), and neither has that of an update.
    """

    min_directions: ClassVar[int] = 4
    bias: ClassVar[str] = (
        "the gradient, divided by about its norm (times mu, over the deviation of the losses)"
    )

    def estimate(self, probes: Sequence[Probe], losses: Sequence[float]) -> Estimate:
        """Return the difference of each direction's loss from that at theta, over the deviation."""
        base, *sides = losses
        spread = deviation(sides, degrees_of_freedom=len(sides) - 1)
        return Estimate(
            loss=base,
            projected_grads=in_units_of(spread, [side - base for side in sides]),
        )
