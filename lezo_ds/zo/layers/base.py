"""What a layer policy is: it drops some transformer blocks from each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class LayerSample:
    """Which transformer blocks a step leaves alone, and how much the others count.

    Attributes:
        dropped: sorted indices of the blocks that are neither perturbed nor updated.
        weights: factor of the update of each block of the model; empty if all are 1.
    """

    dropped: tuple[int, ...]
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class LayerPolicy(ABC):
    """Samples the transformer blocks of each step. A pure function of its arguments.

    Attributes:
        num_layers: number of transformer blocks of the model.
        num_dropped: how many of them a step drops, 0 to num_layers.
        has_weights: whether its samples have weights.
        bias: how the mean of a block's update, over the samples, depends on the block; empty if it does not.
    """

    num_layers: int
    num_dropped: int
    has_weights: ClassVar[bool] = False
    bias: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not 0 <= self.num_dropped <= self.num_layers:
            raise ValueError(f"num_dropped {self.num_dropped} is not in [0, {self.num_layers}]")

    @property
    def num_kept(self) -> int:
        """Number of blocks that a step perturbs."""
        return self.num_layers - self.num_dropped

    @abstractmethod
    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the sample of the next step, whose index is the number of records.

        Args:
            seed: of the run.
            records: of all steps so far.
        """


def num_dropped_from_sparsity(sparsity: float, num_layers: int) -> int:
    """Return how many transformer blocks a step drops: the share `sparsity` (0 to 1), rounded half up.

    >>> [num_dropped_from_sparsity(0.75, num_layers) for num_layers in (24, 40, 48)]
    [18, 30, 36]
    """
    return int(sparsity * num_layers + 0.5)
