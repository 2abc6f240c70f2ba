"""A bandit over the blocks: those whose perturbation changed the loss most are perturbed most often."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from lezo_ds.zo.arithmetic import add_in_order
from lezo_ds.zo.layers.base import LayerPolicy, LayerSample
from lezo_ds.zo.layers.sampling import kept_probabilities, weighted_sample
from lezo_ds.zo.options import check_option
from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class AdaLezo(LayerPolicy):
    """p_i = (1 - exploration) * q_i + exploration * m / L: the probability that block i is perturbed.

    q_i is as proportional to s_i as q_i <= 1 allows, and s_i is the root of the mean squared projected
    gradient over the last `window` applied steps that perturbed block i. m of L blocks are perturbed. The
    update of block i is multiplied by (m / L) / p_i, so that the policy leaves the mean of the estimate as it
    is. These factors are at most 1 / exploration.

    Source: the idea is AdaLeZO's (the authors of LeZO, 2026): a bandit that learns from projected gradients
    which blocks matter, with importance weights. Its formulas were not at hand. This policy takes the
    probabilities with the least variance (those proportional to the root of the mean square, as in importance
    sampling), a window of steps, and exploration by a mixture with the uniform policy. All blocks of a step
    share its projected gradient, since that is all that is measured.

    Its state is the step records. A block that no applied step has perturbed yet counts as the mean of the
    others; before the first applied step, all blocks are equal.

    Attributes:
        window: number of steps, at least 1.
        exploration: above 0 and at most 1, which is uniform.

    Raises:
        UserError: an option is out of range.
    """

    window: int = 20
    exploration: float = 0.5
    has_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        options = "zo.layer_policy_options."
        check_option(
            options + "window",
            self.window,
            self.window >= 1,
            expected="at least 1",
            fix=f"set {options}window=20",
        )
        check_option(
            options + "exploration",
            self.exploration,
            0 < self.exploration <= 1,
            expected="above 0, at most 1",
            fix=f"set {options}exploration=0.5",
        )

    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the sample of the next step."""
        uniform = Fraction(self.num_kept, self.num_layers)
        exploration = Fraction(self.exploration)
        learned = kept_probabilities(self._scores(records), self.num_kept)
        mixed = [(1 - exploration) * probability + exploration * uniform for probability in learned]
        return weighted_sample(seed, len(records), mixed)

    def _scores(self, records: Sequence[StepRecord]) -> list[float]:
        """Return s_i of each block."""
        squares: list[list[float]] = [[] for _ in range(self.num_layers)]
        unfinished = set(range(self.num_layers))
        for record in reversed(records):
            if not unfinished:
                break
            if record.applied:
                square = _mean_square(record.projected_grads)
                for layer in unfinished.difference(record.dropped_layers):
                    squares[layer].append(square)
                unfinished = {layer for layer in unfinished if len(squares[layer]) < self.window}
        scores = [math.sqrt(_mean(found)) if found else None for found in squares]
        known = [score for score in scores if score is not None]
        unknown = _mean(known) if known else 1.0
        return [unknown if score is None else score for score in scores]


def _mean_square(values: Sequence[float]) -> float:
    return _mean([value * value for value in values])


def _mean(values: Sequence[float]) -> float:
    """Return the mean, never infinite."""
    return min(add_in_order(values) / len(values), sys.float_info.max)
