"""A layer policy that uses all that one may: weights, groups outside the blocks, and records."""

from dataclasses import dataclass
from typing import ClassVar

from lezo_ds import LayerPolicy
from lezo_ds.zo.layers import LayerSample


@dataclass(frozen=True)
class Weighted(LayerPolicy):
    """Drops every third group, others in each step, and weights the rest by the last gradient."""

    has_weights: ClassVar[bool] = True

    def sample(self, seed, records):
        last = abs(records[-1].projected_grads[0]) if records else 0.0
        weights = [0.0] * self.num_groups
        for group in range(self.num_groups):
            if (seed + len(records) + group) % 3:
                weights[group] = (1 + group / 8) / (1 + last)
        dropped = tuple(group for group, weight in enumerate(weights) if weight == 0)
        return LayerSample(dropped, tuple(weights))
