"""Layer policies: the transformer blocks that a step drops.

To add one: a subclass of `LayerPolicy` here and a line at the end, or
`zo.layer_policy: package.module:Name`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from lezo_ds.errors import UserError
from lezo_ds.registry import Registry
from lezo_ds.zo.keys import layer_order
from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class LayerSample:
    """What a policy chose for one step.

    A group is a block, the embeddings, or the other weights outside the blocks.

    Attributes:
        dropped: sorted indices of the groups that the step neither perturbs nor updates.
        weights: a factor for the update of each group; empty if all factors are 1.
    """

    dropped: tuple[int, ...]
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerPolicy(ABC):
    """Samples the transformer blocks of each step. A pure function of its arguments.

    Fields that a subclass adds are its options, `zo.layer_policy_options`; each has a default.

    Attributes:
        num_layers: number of transformer blocks of the model.
        num_dropped: how many of them a step drops, 0 to num_layers.
        trains_outside: whether weights outside the blocks are trained, as two groups: the
            embeddings, and the rest.
        has_weights: whether its samples have weights.
    """

    num_layers: int
    num_dropped: int
    trains_outside: bool = True
    has_weights: ClassVar[bool] = False

    @property
    def num_groups(self) -> int:
        """Number of groups: the blocks have the indices from 0, the groups outside follow."""
        return self.num_layers + (2 if self.trains_outside else 0)

    @property
    def num_kept(self) -> int:
        return self.num_layers - self.num_dropped

    @abstractmethod
    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the sample of the step after `records`, the records of all steps so far."""

    def checked_sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the sample of the step, which a user-defined policy may get wrong.

        Raises:
            UserError: it is no `LayerSample` of the groups.
        """
        sample = self.sample(seed, records)
        num_weights = self.num_groups if self.has_weights else 0
        if isinstance(sample, LayerSample) and len(sample.weights) == num_weights:
            groups = [group for group in range(self.num_groups) if group in sample.dropped]
            if groups == list(sample.dropped) and all(map(math.isfinite, sample.weights)):
                return replace(sample, dropped=tuple(groups))  # they may be NumPy's
        raise UserError(
            f"the layer policy {type(self).__name__} returned {sample!r}, and the model has "
            f"{self.num_groups} groups to drop",
            fix="return lezo_ds.zo.layers.LayerSample with sorted indices of groups in dropped, "
            f"and {num_weights} weights",
        )


@dataclass(frozen=True)
class Uniform(LayerPolicy):
    """Drops blocks uniformly without replacement (LeZO, Wang et al. 2024, Algorithm 1, line 3)."""

    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        order = layer_order(seed, step=len(records), num_layers=self.num_layers)
        return LayerSample(dropped=tuple(sorted(order[: self.num_dropped])))


@dataclass(frozen=True)
class Fixed(LayerPolicy):
    """Perturbs the same blocks in every step.

    Attributes:
        blocks: indices and ranges of the blocks to keep, such as "0, 8-11". Empty stands for the
            last blocks.
    """

    blocks: str = ""

    def __post_init__(self) -> None:
        num_named = len(self._kept())
        if num_named != self.num_kept:
            sparsity = 1 - num_named / self.num_layers
            raise UserError(
                f"zo.layer_policy_options.blocks={self.blocks} does not name {self.num_kept} of "
                f"the model's {self.num_layers} blocks, as many as zo.sparsity keeps",
                fix=f"set zo.sparsity={sparsity:.4g}, or leave out blocks",
            )

    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        dropped = set(range(self.num_layers)) - self._kept()
        return LayerSample(dropped=tuple(sorted(dropped)))

    def _kept(self) -> set[int]:
        if not self.blocks.strip():
            return set(range(self.num_dropped, self.num_layers))
        kept: set[int] = set()
        for item in self.blocks.split(","):
            first, dash, last = item.partition("-")
            try:
                blocks = range(int(first), int(last if dash else first) + 1)
            except ValueError:
                blocks = range(0)
            if not blocks or blocks[-1] >= self.num_layers or not kept.isdisjoint(blocks):
                raise UserError(
                    f"zo.layer_policy_options.blocks={self.blocks} does not name different blocks "
                    f"from 0 to {self.num_layers - 1}",
                    fix='set it to a string such as "0, 2-3", or leave it out for the last blocks',
                )
            kept.update(blocks)
        return kept


LAYER_POLICIES: Registry[type[LayerPolicy]] = Registry(
    "layer policy", "zo.layer_policy", kind=LayerPolicy
)
LAYER_POLICIES.add("uniform", Uniform)
LAYER_POLICIES.add("fixed", Fixed)


def num_dropped(sparsity: float, num_layers: int) -> int:
    """Return how many blocks a step drops: the share `sparsity` (0 to 1), rounded half up.

    >>> [num_dropped(0.75, num_layers) for num_layers in (24, 40, 48)]
    [18, 30, 36]
    """
    return int(sparsity * num_layers + 0.5)
