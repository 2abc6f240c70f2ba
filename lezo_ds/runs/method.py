"""What differs between the ways to train: the interface of a method, which `Run` is composed with.

    ZerothOrderMethod (zeroth_order.py)   LeZO, MeZO; scoring only is the case of no steps
        a step        forward passes at probes, then an update of each rank's shards
        durable       journal.jsonl has a line for each step; snapshots only save a replay
    FirstOrderMethod (first_order.py)     AdamW
        a step        forward and backward passes, then DeepSpeed's optimizer
        durable       training_state.json names the checkpoint from which a run resumes

A method knows nothing of evaluations that are due, of requests to stop, or of metrics.jsonl: `Run` does.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from lezo_ds.checkpoints.snapshots import SnapshotOwner, own_snapshots, snapshot_path
from lezo_ds.engine import ModelEngine
from lezo_ds.journal import EvaluationRecord
from lezo_ds.runs.directory import RunDirectory

logger = logging.getLogger(__name__)

StepMetrics = dict[str, float | bool | None]
"""Numbers of a step by the names that metrics.jsonl and monitors show, such as `loss` and `applied`."""


class TrainingMethod(ABC):
    """How a step changes the weights, what makes it durable, and how weights come back.

    Rank 0 writes files. `open`, `step`, `record`, `check`, `save` and `restore` are collectives: all
    ranks call them in the same order.

    Attributes:
        engine: the sharded model. `open` brings it to the step at which the run resumes.
        evaluations: all recorded evaluations, oldest first, the same on every rank.
        needs_snapshot_to_stop: whether steps since the last snapshot are lost if the run stops now.
    """

    engine: ModelEngine
    evaluations: list[EvaluationRecord]
    needs_snapshot_to_stop: bool

    @abstractmethod
    def open(self) -> None:
        """Start or open the run's records, and bring the engine to the last recorded step.

        What another run has left in the directory is moved aside.
        """

    @abstractmethod
    def step(self) -> StepMetrics:
        """Do the next training step and return its numbers. It is recorded before this returns."""

    @abstractmethod
    def record(self, evaluation: EvaluationRecord) -> None:
        """Add an evaluation to the run's records."""

    @abstractmethod
    def check(self) -> None:
        """Check the weights, as far as anything is known of them, and wait for records to be on disk.

        Raises:
            DesyncError: the weights of a rank are not what the steps made of them.
            JournalError: the records of the last steps cannot be written.
        """

    @abstractmethod
    def save(self) -> None:
        """Make the current step one to resume from or to restore, unless it is one already."""

    @abstractmethod
    def restore(self, step: int) -> None:
        """Bring the engine to the exact weights after a step, whose snapshot or record the run has kept."""

    @abstractmethod
    def protected_steps(self, *, is_finished: bool) -> tuple[int, ...]:
        """Return the steps whose snapshots stay, whatever train.keep_snapshots is.

        A run that `is_finished` needs fewer of them: nothing resumes from them.
        """

    @abstractmethod
    def num_skipped_steps(self) -> int:
        """Return the number of steps that changed nothing. Only that of rank 0 counts."""

    @abstractmethod
    def close(self) -> None:
        """Finish the run's records. Nothing can be recorded afterwards."""


def set_foreign_snapshots_aside(directory: RunDirectory, owner: SnapshotOwner) -> None:
    """Move snapshots of other runs, and of steps after the end of the run's records, out of the way."""
    _, foreign_steps = own_snapshots(directory.snapshots, owner)
    directory.set_aside(
        [snapshot_path(directory.snapshots, step) for step in foreign_steps],
        "of another run, or of steps that are no longer recorded:",
    )
