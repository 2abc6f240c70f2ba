"""Who shares the forward passes of a step. A worker is a rank, or a group that splits the weights.

Ranks       the workers of this launch
Replicas    those of all launches of a run, which come and go (replicas/quorum.py)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from lezo_ds.errors import UserError
from lezo_ds.zo.passes import Pass


class Workers(ABC):
    """Shares passes among workers, and sums what they have measured."""

    @abstractmethod
    def passes_of(self, worker: int, passes: Sequence[Pass]) -> list[Pass]:
        """Return the passes of a worker of this launch.

        Its workers gather weights together, so all of them have equally many.
        """

    @abstractmethod
    def learning_rate(self, own: float) -> float:
        """Return the learning rate of the next step; `own` is what this machine computes."""

    @abstractmethod
    def sum(self, values: Sequence[float], claims: Mapping[str, str]) -> list[float]:
        """Return the sums over all workers. A collective.

        Args:
            values: summed over the workers of this launch, which agree on the claims.
            claims: what they work on (see `agreement`).
        """


class Ranks(Workers):
    """The workers of one launch. Worker w of n runs the passes w, w + n, w + 2 n, ..."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def passes_of(self, worker: int, passes: Sequence[Pass]) -> list[Pass]:
        """Return a worker's passes. UserError: the workers cannot share them evenly."""
        if len(passes) % self._num_workers:
            raise UserError(
                f"{len(passes)} forward passes cannot be shared evenly among "
                f"{self._num_workers} ranks",
                fix="change train.micro_batch_size or the number of ranks",
            )
        return list(passes[worker :: self._num_workers])

    def learning_rate(self, own: float) -> float:
        return own

    def sum(self, values: Sequence[float], claims: Mapping[str, str]) -> list[float]:
        return list(values)
