"""What differs between the ways to train: the interface of a method, which `Run` is composed with.

    ZerothOrderMethod (zeroth_order.py)   LeZO and MeZO; a run that only scores has no steps
        a step        forward passes at probes, then an update of each rank's shards
        on disk       journal.jsonl has a line for each step; a snapshot only saves time
    FirstOrderMethod (first_order.py)     AdamW
        a step        forward and backward passes, then DeepSpeed's optimizer
        on disk       training_state.json names the checkpoint from which a run resumes

A method knows nothing of evaluations that are due, of requests to stop, or of metrics.jsonl: these
are the same for all methods, and `Run` has them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from lezo_ds import distributed
from lezo_ds.checkpoints.snapshots import (
    SnapshotOwner,
    own_snapshots,
    read_manifest,
    snapshot_path,
)
from lezo_ds.config import RunConfig
from lezo_ds.data.prefetch import StepBatches
from lezo_ds.data.task_data import TaskData
from lezo_ds.engine import ModelEngine
from lezo_ds.journal import EvaluationRecord
from lezo_ds.runs.directory import RunDirectory

logger = logging.getLogger(__name__)

StepMetrics = dict[str, float | bool | None]
"""Numbers of a step, by the names that they have in metrics.jsonl, such as `loss` and `applied`."""


class TrainingMethod(ABC):
    """How a step changes the weights, where it is recorded, and how earlier weights come back.

    Rank 0 writes files. `open`, `step`, `record`, `check`, `save` and `restore` are collectives:
    all ranks call them in the same order.

    Attributes:
        config: the configuration of the run.
        data: the encoded splits, the metric and the objective.
        batches: the batches of the steps; a thread lays out the next one.
        directory: where rank 0 writes.
        engine: the sharded model. `open` brings it to the step at which the run resumes.
        evaluations: all recorded evaluations, oldest first, the same on every rank.
        needs_snapshot_to_stop: whether a stop would lose the steps since the last snapshot.
    """

    engine: ModelEngine
    needs_snapshot_to_stop: bool

    def __init__(
        self, config: RunConfig, data: TaskData, directory: RunDirectory, engine: ModelEngine
    ) -> None:
        self.config = config
        self.data = data
        self.batches = StepBatches(data, config)
        self.directory = directory
        self.engine = engine
        self.evaluations: list[EvaluationRecord] = []

    @abstractmethod
    def open(self) -> None:
        """Start or open the run's records, and bring the engine to the last recorded step.

        What another run has left in the directory is moved aside.
        """

    @abstractmethod
    def step(self) -> StepMetrics:
        """Do the next training step and return its numbers."""

    @abstractmethod
    def record(self, evaluation: EvaluationRecord) -> None:
        """Add an evaluation to the run's records."""

    @abstractmethod
    def check(self) -> None:
        """Check the weights, if their right values are known, and wait for records to be synced.

        Raises:
            DesyncError: the weights of a rank are not what the steps made of them.
            JournalError: the records of the last steps cannot be written.
        """

    @abstractmethod
    def restore(self, step: int) -> None:
        """Bring the engine to the exact weights after a step that was validated."""

    @abstractmethod
    def protected_steps(self, *, is_finished: bool) -> tuple[int, ...]:
        """Return the steps whose snapshots stay, whatever train.keep_snapshots is.

        A run that `is_finished` may need fewer of them.
        """

    @abstractmethod
    def num_skipped_steps(self) -> int:
        """Return the number of steps that changed nothing. Only that of rank 0 counts."""

    def num_flat_steps(self) -> int:
        """Return the number of steps whose probes had equal losses. Only that of rank 0 counts."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Close the run's records. Nothing can be recorded afterwards."""

    @abstractmethod
    def owner(self) -> SnapshotOwner:
        """Return what the snapshots of this run have in their manifests. For rank 0."""

    def save(self) -> None:
        """Write a snapshot of the current step, and what a run resumes from, unless it is there."""
        step = self.engine.global_steps
        target = snapshot_path(self.directory.snapshots, step)

        def is_there() -> bool:
            manifest = read_manifest(target)
            return manifest is not None and self.owner().owns(step, manifest)

        if distributed.on_rank_zero(is_there):
            return
        self.check()  # wrong weights would come back from a snapshot after every restart
        checksum = None
        if distributed.rank() == 0:
            checksum = self.owner().checksum(step)
        self.engine.write_model(target, journal=checksum)

    def prepare_resumption(self, num_steps: int) -> None:
        """Announce it. Move snapshots of other runs or of unrecorded steps aside. For rank 0."""
        if num_steps > 0:  # loading or replaying them may take a while
            logger.info("resuming at step %d of %d", num_steps, self.config.train.steps)
        root = self.directory.snapshots
        _, foreign_steps = own_snapshots(root, self.owner())
        self.directory.set_aside([snapshot_path(root, step) for step in foreign_steps])
