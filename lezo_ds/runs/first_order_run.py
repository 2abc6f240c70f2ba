"""A run of AdamW: DeepSpeed's checkpoint and training_state.json are its training state."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lezo_ds import distributed
from lezo_ds.config import RESUME_MAY_DIFFER, RunConfig
from lezo_ds.data.task_data import TaskData
from lezo_ds.engine.first_order_engine import FirstOrderEngine
from lezo_ds.errors import UserError
from lezo_ds.journal import EvaluationRecord, Header
from lezo_ds.model.snapshots import read_manifest, snapshot_path, snapshot_steps
from lezo_ds.runs.header import assert_same_run, make_header
from lezo_ds.runs.run import Run, best_evaluation
from lezo_ds.runs.run_directory import RunDirectory
from lezo_ds.runs.training_state import TrainingState, read_training_state

_RESUME_MAY_DIFFER = RESUME_MAY_DIFFER - {"train.steps"}  # the learning rate depends on it


class FirstOrderRun(Run):
    """A run whose engine is a FirstOrderEngine."""

    saves_when_stopped = True

    def __init__(
        self, config: RunConfig, data: TaskData, directory: RunDirectory, engine: FirstOrderEngine
    ) -> None:
        super().__init__(config, data, directory, engine)
        self._adamw = engine
        base = engine.base
        header = make_header(config, base.fingerprint, base.table_hash)
        self._state = TrainingState(header, engine.world_size)

    def _open(self) -> None:
        """Load the checkpoint that counts, if there is one; what was saved after it is removed."""
        self._state = distributed.on_rank_zero(self._open_state)
        self.evaluations = list(self._state.evaluations)
        if self._state.step > 0:
            self._adamw.load_training_state(self.directory.checkpoints, self._state.step)

    def _open_state(self) -> TrainingState:
        path, state = self.directory.training_state, self._state
        if path.exists():
            state = read_training_state(path).at_checkpoint()
            _check_state(state, self._state.header, self._state.world_size, self.directory.path)
            state = replace(state, world_size=self._state.world_size)
        _remove(self.directory.checkpoints, lambda step: step != state.step)
        _remove(self.directory.snapshots, lambda step: step > state.step)
        return state

    def _train_step(self) -> dict[str, Any]:
        batch = self.data.batch(self.config, self._adamw.global_steps)
        learning_rate, skipped = self._adamw.learning_rate, self._adamw.skipped_steps
        loss = self._adamw.train_batch(batch, self.data.loss)
        applied = self._adamw.skipped_steps == skipped
        return {"loss": loss, "learning_rate": learning_rate, "applied": applied}

    def _record_evaluation(self, record: EvaluationRecord) -> None:
        """Keep the evaluation, and the weights too while they are the best."""
        evaluations = [*self.evaluations, record]
        if record.split == "dev" and best_evaluation(evaluations) is record:
            self._write_snapshot()
        self._state = self._state.with_evaluations(evaluations)
        self._write_state()

    def _is_saved(self, step: int) -> bool:
        return self._state.step == step

    def _save(self) -> None:
        self._write_snapshot()
        self._adamw.save_training_state(self.directory.checkpoints)
        self._state = replace(self._state, step=self._adamw.global_steps)
        self._write_state()
        if self.writes:
            _remove(self.directory.checkpoints, lambda step: step != self._state.step)

    def _write_snapshot(self) -> None:
        target = snapshot_path(self.directory.snapshots, self._adamw.global_steps)
        if not distributed.on_rank_zero(lambda: read_manifest(target) is not None):
            self._adamw.write_model(target)

    def _write_state(self) -> None:
        distributed.on_rank_zero(lambda: self._state.write(self.directory.training_state))

    def _protected(self) -> tuple[int, ...]:
        best = self._best()
        return () if best is None else (best.step,)

    def _restore(self, step: int) -> None:
        self._adamw.load_model(snapshot_path(self.directory.snapshots, step), step)

    def _details(self) -> dict[str, Any]:
        return {
            "skipped_steps": self._adamw.skipped_steps,
            "model_fingerprint": self._adamw.base.fingerprint,
            "weights_digest": self._adamw.weights.digest(),
        }


def check_training_state(config: RunConfig, directory: RunDirectory, world_size: int) -> None:
    """Refuse, before any weights load, to resume a run with another configuration or number of ranks.

    Raises:
        UserError: naming what differs.
    """
    if not directory.training_state.exists():
        return
    state = read_training_state(directory.training_state)
    header = state.header
    # What needs the weights is taken from the file here, and compared once they are loaded.
    ours = make_header(config, header.model_fingerprint, header.parameter_table_hash)
    _check_state(state, ours, world_size, directory.path)


def _check_state(state: TrainingState, header: Header, world_size: int, run_dir: Path) -> None:
    assert_same_run(state.header, header, run_dir, _RESUME_MAY_DIFFER)
    if state.step > 0 and state.world_size != world_size:
        raise UserError(
            "the checkpoint of a first-order run is sharded among another number of ranks",
            got=f"{world_size} ranks",
            expected=f"{state.world_size}, as it was begun with",
            fix="start as many ranks, or use another run_dir",
        )


def _remove(root: Path, unwanted: Callable[[int], bool]) -> None:
    for step in snapshot_steps(root):
        if unwanted(step):
            shutil.rmtree(snapshot_path(root, step))
