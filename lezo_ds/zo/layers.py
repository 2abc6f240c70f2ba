"""Layer policies: the transformer blocks that a step drops.

To add one: a subclass of `LayerPolicy` here and a line at the end, or `zo.layer_policy: package.module:Name`.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from lezo_ds.errors import UserError
from lezo_ds.registry import Registry
from lezo_ds.zo.keys import layer_draw, layer_order
from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class LayerSample:
    """The sorted indices of the groups that a step drops, and a factor for the update of each group.

    A group is a block, the embeddings, or the other weights outside the blocks. `weights` is empty if all
    factors are 1.
    """

    dropped: tuple[int, ...]
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerPolicy(ABC):
    """Samples the transformer blocks of each step. A pure function of its arguments.

    Fields that a subclass adds are its options, `zo.layer_policy_options`; each has a default.
    """

    num_layers: int
    """Number of transformer blocks of the model."""
    num_dropped: int
    """How many of them a step drops, 0 to num_layers."""
    trains_outside: bool = True
    """Whether weights outside the blocks are trained, as two groups: the embeddings, and the rest."""
    has_weights: ClassVar[bool] = False
    """Whether its samples have weights."""

    @property
    def num_groups(self) -> int:
        """Number of groups of parameters that a sample may drop."""
        return self.num_layers + 2 * self.trains_outside

    @property
    def num_kept(self) -> int:
        """Number of blocks that a step perturbs."""
        return self.num_layers - self.num_dropped

    @abstractmethod
    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the sample of the step after `records`, the records of all steps so far."""


@dataclass(frozen=True)
class Uniform(LayerPolicy):
    """Drops blocks uniformly without replacement (LeZO, Wang et al. 2024, Algorithm 1, line 3)."""

    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the first blocks in the order of a keyed hash, which is the same on every machine."""
        order = layer_order(seed, step=len(records), num_layers=self.num_layers)
        return LayerSample(dropped=tuple(sorted(order[: self.num_dropped])))


@dataclass(frozen=True)
class Fixed(LayerPolicy):
    """Perturbs the same blocks in every step: those that an option names, or the last ones."""

    blocks: str = ""
    """Block indices and ranges, such as "0, 8-11". Empty stands for the last blocks."""

    def __post_init__(self) -> None:
        if len(self._kept()) != self.num_kept:
            raise UserError(
                f"zo.layer_policy_options.blocks={self.blocks} does not name {self.num_kept} of the model's "
                f"{self.num_layers} blocks, as many as zo.sparsity keeps",
                fix=f"set zo.sparsity={1 - len(self._kept()) / self.num_layers:.4g}, or leave out blocks",
            )

    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the blocks that no step perturbs."""
        return LayerSample(dropped=tuple(sorted(set(range(self.num_layers)) - self._kept())))

    def _kept(self) -> set[int]:
        if not self.blocks.strip():
            return set(range(self.num_dropped, self.num_layers))
        kept: set[int] = set()
        for part in self.blocks.split(","):
            match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
            blocks = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
            if not blocks or blocks[-1] >= self.num_layers or kept & set(blocks):
                raise UserError(
                    f"zo.layer_policy_options.blocks={self.blocks} does not name different blocks from 0 to "
                    f"{self.num_layers - 1}",
                    fix='set it to a string such as "0, 2-3", or leave it out for the last blocks',
                )
            kept |= set(blocks)
        return kept


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
                size = min(sum(map(abs, record.projected_grads)) / len(record.projected_grads), 1e300)
                for group in set(range(self.num_groups)).difference(record.dropped_layers):
                    quality[group] = (1 - self.alpha) * quality[group] + self.alpha * size
        self.__dict__["_averages"] = (len(records), quality)
        largest = max(quality) or 1.0
        shares = [math.exp((value / largest - 1) / self.tau) for value in quality]
        total = sum(shares)
        return [(1 - self.gamma) * share / total + self.gamma / self.num_groups for share in shares]


LAYER_POLICIES: Registry[type[LayerPolicy]] = Registry("layer policy", "zo.layer_policy", kind=LayerPolicy)
LAYER_POLICIES.add("uniform", Uniform)
LAYER_POLICIES.add("fixed", Fixed)
LAYER_POLICIES.add("adalezo", AdaLezo)


def num_dropped(sparsity: float, num_layers: int) -> int:
    """Return how many transformer blocks a step drops: the share `sparsity` (0 to 1), rounded half up.

    >>> [num_dropped(0.75, num_layers) for num_layers in (24, 40, 48)]
    [18, 30, 36]
    """
    return int(sparsity * num_layers + 0.5)
