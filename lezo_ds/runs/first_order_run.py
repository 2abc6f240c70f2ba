"""A run of AdamW. DeepSpeed's checkpoint and training_state.json are its training state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lezo_ds import distributed
from lezo_ds.config import RESUME_MAY_DIFFER, RunConfig
from lezo_ds.data.task_data import TaskData
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, remove_directory, write_atomically
from lezo_ds.journal import EvaluationRecord, Header, step_checksums
from lezo_ds.model.snapshots import (
    SnapshotOwner,
    read_manifest,
    remove_snapshots,
    snapshot_path,
    snapshot_steps,
)
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.first_order import FirstOrderEngine
from lezo_ds.runs.header import assert_same_run, header_without_weights, make_header
from lezo_ds.runs.run import Run, best_evaluation

RESUME_MAY_DIFFER_FIRST_ORDER = RESUME_MAY_DIFFER - {"train.steps"}  # the learning rate depends on it


@dataclass(frozen=True)
class TrainingState:
    """The content of training_state.json, which names the checkpoint to resume from."""

    header: Header
    world_size: int
    """Number of ranks. The optimizer states in the checkpoint have one shard per rank."""
    step: int = 0
    """Number of steps that the checkpoint has seen; 0 if there is no checkpoint yet."""
    evaluations: tuple[EvaluationRecord, ...] = ()
    """All evaluations so far. Those after the checkpoint are repeated when the run resumes."""

    @property
    def owner(self) -> SnapshotOwner:
        """The owner of the run's snapshots: there is no chain of steps, so all have the header's checksum."""
        return SnapshotOwner(self.header.model_fingerprint, step_checksums(self.header, ()))

    def write(self, path: Path) -> None:
        """Replace the file atomically."""
        with failures_named(path):
            write_atomically(path, json.dumps(asdict(self), indent=1) + "\n")


def read_training_state(path: Path) -> TrainingState:
    """Read the file that `TrainingState.write` wrote."""
    try:
        values = json.loads(path.read_text())
        return TrainingState(
            header=Header(**values["header"]),
            world_size=values["world_size"],
            step=values["step"],
            evaluations=tuple(EvaluationRecord(**record) for record in values["evaluations"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read: {type(error).__name__}: {error}",
            fix="restore the file from a copy, or use another run_dir",
        ) from error


class FirstOrderRun(Run[FirstOrderEngine]):
    """A run whose engine is a FirstOrderEngine."""

    saves_when_stopped = True

    def __init__(
        self, config: RunConfig, data: TaskData, directory: RunDirectory, engine: FirstOrderEngine
    ) -> None:
        super().__init__(config=config, data=data, directory=directory, engine=engine)
        header = make_header(config, data, engine.base.fingerprint, engine.base.table_hash)
        self._state = TrainingState(header, engine.world_size)

    def _open(self) -> None:
        """Load the checkpoint that training_state.json names, and remove everything newer."""
        self._state = distributed.on_rank_zero(self._open_state)
        self.evaluations = list(self._state.evaluations)
        self._announce(self._state.step)
        if self._state.step > 0:
            self.engine.load_training_state(self.directory.checkpoints, self._state.step)

    def _open_state(self) -> TrainingState:
        path, state = self.directory.training_state, self._state
        if path.exists():
            recorded = read_training_state(path)
            _check_state(recorded, state.header, state.world_size)
            done = tuple(record for record in recorded.evaluations if record.step <= recorded.step)
            state = replace(recorded, world_size=state.world_size, evaluations=done)
            self._set_aside_foreign_snapshots(state.owner)
        else:
            self._set_aside_earlier_run()
        _remove(self.directory.checkpoints, lambda step: step != state.step)
        _remove(self.directory.snapshots, lambda step: step > state.step)
        return state

    def _train_step(self) -> dict[str, Any]:
        batch = self.data.step_batch(self.config, self.engine.global_steps)
        learning_rate, skipped = self.engine.learning_rate, self.engine.skipped_steps
        loss = self.engine.train_batch(batch, self.data.loss)
        applied = self.engine.skipped_steps == skipped
        return {"loss": loss, "learning_rate": learning_rate, "applied": applied}

    def _record_evaluation(self, record: EvaluationRecord) -> None:
        """Record the evaluation. If it is the best so far, keep the weights too."""
        evaluations = [*self.evaluations, record]
        if record.split == "dev" and best_evaluation(evaluations) is record:
            self._write_snapshot()
        self._state = replace(self._state, evaluations=tuple(evaluations))
        self._write_state()

    def _is_saved(self, step: int) -> bool:
        return self._state.step == step

    def _save(self) -> None:
        # training_state.json is written last. A crash before that resumes from the old checkpoint, which is
        # removed only when the file names the new one.
        self._write_snapshot()
        self.engine.save_training_state(self.directory.checkpoints)
        self._state = replace(self._state, step=self.engine.global_steps)
        self._write_state()
        if self.writes:
            _remove(self.directory.checkpoints, lambda step: step != self._state.step)

    def _write_snapshot(self) -> None:
        target = snapshot_path(self.directory.snapshots, self.engine.global_steps)
        if not distributed.on_rank_zero(lambda: read_manifest(target) is not None):
            owner = self._state.owner
            self.engine.write_model(target, journal=owner.checksum(self.engine.global_steps))

    def _write_state(self) -> None:
        distributed.on_rank_zero(lambda: self._state.write(self.directory.training_state))

    def _protected(self) -> tuple[int, ...]:
        best = best_evaluation(self.evaluations)
        return () if best is None else (best.step,)

    def _drop_weights(self) -> None:
        remove_directory(self.directory.checkpoints)
        remove_snapshots(self.directory.snapshots)

    def _restore(self, step: int) -> None:
        self.engine.load_model(snapshot_path(self.directory.snapshots, step), step)

    def _details(self) -> dict[str, Any]:
        return {"skipped_steps": self.engine.skipped_steps}


def check_training_state(config: RunConfig, data: TaskData, directory: RunDirectory) -> None:
    """Refuse, before weights are loaded, to resume a run with other settings, data or number of ranks."""
    if not directory.training_state.exists():
        return
    state = read_training_state(directory.training_state)
    _check_state(state, header_without_weights(state.header, config, data), distributed.world_size())
    if state.step > 0 and not snapshot_path(directory.checkpoints, state.step).is_dir():
        raise weights_removed(directory.path)


def _check_state(state: TrainingState, ours: Header, world_size: int) -> None:
    assert_same_run(state.header, ours, RESUME_MAY_DIFFER_FIRST_ORDER)
    if state.step > 0 and state.world_size != world_size:
        raise UserError(
            f"the checkpoint of a first-order run has {state.world_size} ranks, not {world_size}",
            fix=f"start {state.world_size} ranks, or use another run_dir",
        )


def weights_removed(run_dir: Path) -> UserError:
    """Return the error for a first-order run whose weights are needed, but were removed at its end."""
    return UserError(
        f"run {run_dir} has no weights: train.keep_snapshots=0 removed them, and adamw has no journal",
        fix=f"train again: --config {run_dir / 'config.yaml'} run_dir=NEW train.keep_snapshots=1",
    )


def _remove(root: Path, unwanted: Callable[[int], bool]) -> None:
    for step in snapshot_steps(root):
        if unwanted(step):
            shutil.rmtree(snapshot_path(root, step))
