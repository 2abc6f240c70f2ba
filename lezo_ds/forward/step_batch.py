"""The batch of a step, of which a rank lays out only the micro-batches that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from lezo_ds.forward.batch import MicroBatch


class StepBatch:
    """All micro-batches of a step. Each is laid out when it is read first, and then kept.

    Args:
        weights: weight of each micro-batch, which is known before it is laid out.
        build: function (index) -> the micro-batch, the same on every rank. It has the weight given here.
        content: what the micro-batches are made of, such as the indices of their examples. Ranks compare it.
    """

    def __init__(self, weights: Sequence[float], build: Callable[[int], MicroBatch], content: bytes) -> None:
        self.weights = weights
        self.content = content
        self._build = build
        self._built: dict[int, MicroBatch] = {}

    @classmethod
    def of(cls, batch: StepBatch | Sequence[MicroBatch]) -> StepBatch:
        """Return a batch whose micro-batches may have been laid out already."""
        if isinstance(batch, StepBatch):
            return batch
        return cls([micro_batch.weight for micro_batch in batch], batch.__getitem__, b"")

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, index: int) -> MicroBatch:
        if index not in self._built:
            built = self._build(index)
            if built.weight != self.weights[index]:
                raise ValueError(f"micro-batch {index} has weight {built.weight}, not {self.weights[index]}")
            self._built[index] = built
        return self._built[index]

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def total_weight(self) -> float:
        """Number of terms of the mean loss of the step."""
        return sum(self.weights)
