"""AdaLeZO: a layer policy that learns from projected gradients which parameters matter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from lezo_ds.errors import UserError
from lezo_ds.zo.keys import layer_draw
from lezo_ds.zo.layers import LAYER_POLICIES, LayerPolicy, LayerSample
from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class AdaLezo(LayerPolicy):
    """A bandit over groups: those whose perturbation changed the loss most are perturbed most often.

    Source: AdaLeZO as its authors run it (UnifiedZO's trainer). The n groups are the blocks, the embeddings,
    and the rest. With scores Q_i / max Q, p = (1 - gamma) softmax(score / tau) + gamma / n. A step draws
    k = (1 - sparsity) n groups with replacement and perturbs the distinct ones. The update of group i is
    multiplied by count_i * min(1 / (k p_i), clip). After an applied step, Q_i <- (1 - alpha) Q_i + alpha |g|
    for each distinct group. The authors use sparsity 0.8, and clip 4 on hard tasks, 16 on easy ones.
    """

    tau: float = 0.6
    alpha: float = 0.1
    gamma: float = 0.1
    clip: float = 4.0
    interval: int = 1
    """Number of steps for which a draw is kept."""
    has_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        in_range = self.tau > 0 and 0 < self.alpha <= 1 and 0 < self.gamma <= 1
        if not (in_range and self.clip > 0 and self.interval >= 1):
            raise UserError(
                f"zo.layer_policy_options of adalezo are out of range: tau={self.tau}, alpha={self.alpha}, "
                f"gamma={self.gamma}, clip={self.clip}, interval={self.interval}; tau and clip are above 0, "
                "alpha and gamma above 0 and at most 1, and interval is at least 1",
                fix="leave them out for the authors' values",
            )

    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the sample; it depends on the records before the first step of its interval."""
        first = len(records) - len(records) % self.interval
        probabilities = self._probabilities(records[:first])
        ends = list(accumulate(probabilities))
        num_draws = max(1, self.num_groups * self.num_kept // self.num_layers)
        draws = (layer_draw(seed, first, draw) * ends[-1] for draw in range(num_draws))
        counts = Counter(sum(end <= point for end in ends[:-1]) for point in draws)
        factors = (min(1 / (num_draws * p), self.clip) for p in probabilities)
        return LayerSample(
            dropped=tuple(group for group in range(self.num_groups) if group not in counts),
            weights=tuple(counts[group] * factor for group, factor in enumerate(factors)),
        )

    def _probabilities(self, records: Sequence[StepRecord]) -> list[float]:
        # The averages continue those of the step before: anew at every step, a run would be quadratic.
        done, quality = self.__dict__.get("_averages", (0, []))
        if done == 0 or done > len(records):
            done, quality = 0, [0.0] * self.num_groups
        for record in records[done:]:
            if record.applied:
                size = min(
                    sum(map(abs, record.projected_grads)) / len(record.projected_grads), 1e300
                )
                for group in set(range(self.num_groups)).difference(record.dropped_layers):
                    quality[group] = (1 - self.alpha) * quality[group] + self.alpha * size
        self.__dict__["_averages"] = (len(records), quality)
        largest = max(quality) or 1.0
        shares = [math.exp((value / largest - 1) / self.tau) for value in quality]
        total = sum(shares)
        return [(1 - self.gamma) * share / total + self.gamma / self.num_groups for share in shares]


LAYER_POLICIES.add("adalezo", AdaLezo)
