"""LeZO's own policy: every set of the given size is equally likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lezo_ds.zo.keys import layer_order
from lezo_ds.zo.layers.base import LayerPolicy, LayerSample
from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class Uniform(LayerPolicy):
    """Drops blocks uniformly without replacement (LeZO, Wang et al. 2024, Algorithm 1, line 3).

    Blocks are ordered by a keyed hash and the first `num_dropped` are taken, so that the sample is the same
    on every machine and in every version.
    """

    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the sample of the next step."""
        order = layer_order(seed, step=len(records), num_layers=self.num_layers)
        return LayerSample(dropped=tuple(sorted(order[: self.num_dropped])))
