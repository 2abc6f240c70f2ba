"""Who shares the forward passes of a step. A worker is a rank, or a group that splits the weights.

Ranks       the workers of this launch
Replicas    those of all launches of a run, which come and go (replicas/quorum.py)

Workers are also the source of what others have done. Before each step, a run takes over the lines
of their journals and, after it, the evaluations that they have brought along. `Ranks` has no
others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lezo_ds.errors import LezoError, UserError
from lezo_ds.journal import EvaluationRecord, Journal
from lezo_ds.zo.passes import Pass


class StepLostError(LezoError):
    """A launch left during the step. It has changed nothing, and the others repeat it."""


class NoQuorumError(LezoError):
    """There is no quorum yet, and this launch was asked to wait no longer."""


class Lines(NamedTuple):
    """Whole lines of a journal: those after one's own, or all if one has other lines.

    Attributes:
        start: byte of the journal where they begin: the length of one's own lines, or 0.
        data: the lines; empty if none are lacking.
    """

    start: int
    data: bytes


class Workers(ABC):
    """Shares passes among workers, and sums what they have measured.

    Attributes:
        are_shared: whether other launches do the steps of this run, too.
        journal: on rank 0, the journal of this launch. The run sets it when it is open.
        gives_up: on rank 0, whether to wait no longer for others. The run sets it.
        evaluations: of this launch, which are not recorded yet. The run fills it.
    """

    are_shared = False

    def __init__(self) -> None:
        self.journal: Journal | None = None
        self.gives_up: Callable[[], bool] = lambda: False
        self.evaluations: list[EvaluationRecord] = []

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

        Raises:
            StepLostError: a launch has left.
        """

    # What others have done. The methods are collectives of this launch.

    def meet(self, learning_rate: float, *, stops_all: bool) -> Lines | None:
        """Return lines to take over first, or None if this launch takes part in the next step.

        Args:
            learning_rate: of the next step, as this machine computes it.
            stops_all: whether this launch votes that all stop.

        Raises:
            NoQuorumError: this launch gives up.
        """
        return None

    def compare(self, digest: Callable[[], str]) -> None:  # noqa: B027
        """Compare a digest of the weights among all launches in this step."""

    def takes_turn(self, *, is_over: bool) -> bool:
        """Return whether this launch evaluates now. It then leaves the others."""
        return True

    def leave(self) -> None:  # noqa: B027
        """Leave the others until the next `meet`."""

    def brought(self) -> Sequence[EvaluationRecord]:
        """Return what is recorded now, because all launches of the last step have it."""
        found = self.evaluations
        self.evaluations = []
        return found


class Ranks(Workers):
    """The workers of one launch. Worker w of n runs the passes w, w + n, w + 2 n, ..."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
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
