"""AdaLeZO: a layer policy that learns from projected gradients which parameters matter."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lezo_ds.errors import UserError
from lezo_ds.zo.estimators import add_in_order
from lezo_ds.zo.keys import layer_draw
from lezo_ds.zo.layers import LAYER_POLICIES, LayerPolicy, LayerSample
from lezo_ds.zo.records import StepRecord

# A sum of finite projected gradients may overflow. Infinity divided by itself is not a number.
_LARGEST_SCORE = 1e300


@dataclass(frozen=True)
class AdaLezo(LayerPolicy):
    """A bandit over groups: those whose perturbation changed the loss most are perturbed most.

    The n groups are the blocks, the embeddings, and the other weights outside the blocks. Group i
    has a score Q_i, which is 0 at the start. A step draws k = (1 - sparsity) n groups with
    replacement, with probabilities

        p = (1 - gamma) softmax(Q / (tau max Q)) + gamma / n,

    and perturbs the distinct ones. The update of a group that was drawn c_i times is multiplied by
    c_i min(1 / (k p_i), clip), so that it is unbiased unless clipped. After an applied step with
    projected gradients g, each group that was perturbed gets Q_i <- (1 - alpha) Q_i + alpha |g|,
    with |g| the mean over the step's directions.

    Source: AdaLeZO as its authors run it (UnifiedZO's trainer). They use sparsity 0.8, and clip 4
    on hard tasks, 16 on easy ones.

    Attributes:
        tau: temperature of the softmax, above 0.
        alpha: weight of the newest step in a score, above 0 and at most 1.
        gamma: share of the draws that is uniform, above 0 and at most 1.
        clip: largest factor of an update for each time that its group was drawn, above 0.
        interval: number of steps for which a draw is kept, at least 1.
    """

    tau: float = 0.6
    alpha: float = 0.1
    gamma: float = 0.1
    clip: float = 4.0
    interval: int = 1
    has_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        in_range = self.tau > 0 and 0 < self.alpha <= 1 and 0 < self.gamma <= 1
        if not (in_range and self.clip > 0 and self.interval >= 1):
            raise UserError(
                f"zo.layer_policy_options of adalezo are out of range: tau={self.tau}, "
                f"alpha={self.alpha}, gamma={self.gamma}, clip={self.clip}, "
                f"interval={self.interval}; tau and clip are above 0, alpha and gamma above 0 and "
                "at most 1, and interval is at least 1",
                fix="leave them out for the authors' values",
            )

    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the sample; it depends on the records before the first step of its interval."""
        first_step = len(records) - len(records) % self.interval
        probabilities = self._probabilities(records[:first_step])
        num_draws = max(1, self.num_groups * self.num_kept // self.num_layers)
        # Group i owns the interval from the end of group i - 1 to its own end.
        ends = list(itertools.accumulate(probabilities))
        counts: Counter[int] = Counter()
        for draw in range(num_draws):
            point = layer_draw(seed, first_step, draw) * ends[-1]
            counts[bisect.bisect_right(ends, point, hi=self.num_groups - 1)] += 1
        factors = [min(1 / (num_draws * p), self.clip) for p in probabilities]
        return LayerSample(
            dropped=tuple(group for group in range(self.num_groups) if group not in counts),
            weights=tuple(counts[group] * factor for group, factor in enumerate(factors)),
        )

    @functools.cached_property
    def _scores(self) -> _Scores:
        return _Scores(self.num_groups, self.alpha)

    def _probabilities(self, records: Sequence[StepRecord]) -> list[float]:
        """Return the probability of each group after `records`."""
        scores = self._scores.after(records)
        largest = max(scores) or 1.0
        exponentials = [math.exp((score / largest - 1) / self.tau) for score in scores]
        total = add_in_order(exponentials)
        uniform = self.gamma / self.num_groups
        return [(1 - self.gamma) * each / total + uniform for each in exponentials]


class _Scores:
    """The score of each group after a history of steps.

    It remembers the last history that it was asked for. A longer one that begins with it continues
    its scores: from the start at every step, the time of a run would grow with the square of its
    length. Any other history is read from the start.
    """

    def __init__(self, num_groups: int, alpha: float) -> None:
        self._num_groups = num_groups
        self._alpha = alpha
        self._history: list[StepRecord] = []
        self._scores = [0.0] * num_groups

    def after(self, records: Sequence[StepRecord]) -> list[float]:
        # Fast, because equal lists have the same records: Python compares their addresses first.
        if self._history != list(records[: len(self._history)]):
            self._history = []
            self._scores = [0.0] * self._num_groups
        for record in records[len(self._history) :]:
            if record.applied:
                self._add(record)
        self._history = list(records)
        return self._scores

    def _add(self, record: StepRecord) -> None:
        sizes = [abs(gradient) for gradient in record.projected_grads]
        size = min(add_in_order(sizes) / len(sizes), _LARGEST_SCORE)
        for group in set(range(self._num_groups)).difference(record.dropped_layers):
            self._scores[group] = (1 - self._alpha) * self._scores[group] + self._alpha * size


LAYER_POLICIES.add("adalezo", AdaLezo)
