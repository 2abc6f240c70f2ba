"""A run of LeZO or MeZO, whose journal is its training state, or a run that only scores."""

from __future__ import annotations

import logging
from typing import Any

from lezo_ds import distributed
from lezo_ds.config import TRAINED, RunConfig, may_differ_on_resume
from lezo_ds.data.task_data import TaskData
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import UserError
from lezo_ds.journal import EvaluationRecord, Journal, step_checksums
from lezo_ds.model.snapshots import SnapshotOwner, read_manifest, snapshot_path
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.header import assert_same_run, header_without_weights, make_header
from lezo_ds.runs.run import Run
from lezo_ds.runs.screen import number
from lezo_ds.zo.records import StepRecord

logger = logging.getLogger(__name__)


class ZerothOrderRun(Run[LezoEngine]):
    """A run whose engine is a LezoEngine. Rank 0 has the journal, which holds all records."""

    _journal: Journal | None = None

    def _open(self) -> None:
        """Create the journal, or open it and replay it."""
        self.evaluations = distributed.on_rank_zero(self._open_journal)
        if self.writes:
            self._announce(len(self._steps()))
        self._restore(None)
        self.engine.attach_journal(self._journal)
        self.engine.watch_weights()
        if self._starts_from_activations() and self.engine.global_steps == 0:
            self._save()

    def _open_journal(self) -> list[EvaluationRecord]:
        path, base = self.directory.journal, self.engine.base
        header = make_header(self.config, self.data, base.fingerprint, base.table_hash)
        if not path.exists():
            self._set_aside_earlier_run()
            self._journal = Journal.create(path, header)
            return []
        self._journal = Journal.open(path)
        assert_same_run(self._journal.header, header, may_differ_on_resume(self.config))
        self._set_aside_foreign_snapshots(self._owner())
        return [record for record in self._journal.records if isinstance(record, EvaluationRecord)]

    def _steps(self) -> list[StepRecord]:
        """Return all steps on rank 0, and none elsewhere."""
        records = self._journal.records if self._journal is not None else ()
        return [record for record in records if isinstance(record, StepRecord)]

    def _owner(self) -> SnapshotOwner:
        assert self._journal is not None, "only rank 0 has the journal"
        header = self._journal.header
        return SnapshotOwner(header.model_fingerprint, step_checksums(header, self._journal.records))

    def _starts_from_activations(self) -> bool:
        # A prefix starts from the activations of a forward pass, which another machine rounds differently.
        # Replay is exact only if it starts from the very same values, so a snapshot of step 0 keeps them.
        return self.num_steps > 0 and self.config.peft.kind == "prefix"

    def _protected(self) -> tuple[int, ...]:
        return (0,) if self._starts_from_activations() else ()

    def _train_step(self) -> dict[str, Any]:
        batch = self.data.step_batch(self.config, self.engine.global_steps)
        record = self.engine.train_batch(batch, self.data.loss)
        gradients = record.projected_grads
        gradient = sum(gradients) / len(gradients) if gradients else None
        if not record.applied and self.writes:
            text = "step %d skipped: loss %s, projected gradient %s"
            logger.warning(text, record.step, number(record.loss), number(gradient))
        return {"loss": record.loss, "projected_gradient": gradient, "applied": record.applied}

    def _record_evaluation(self, record: EvaluationRecord) -> None:
        if self._journal is not None:
            self._journal.append(record)

    def _check(self) -> None:
        self.engine.check_weights()

    def _is_saved(self, step: int) -> bool:
        manifest = read_manifest(snapshot_path(self.directory.snapshots, step))
        return manifest is not None and bool(self._owner().owns(step, manifest))

    def _save(self) -> None:
        step = self.engine.global_steps
        checksum = self._owner().checksum(step) if self.writes else None
        self.engine.save_checkpoint(self.directory.snapshots, step, checksum)

    def _restore(self, step: int | None) -> None:
        owner = self._owner() if self.writes else None
        self.engine.load_checkpoint(self.directory.snapshots, self._steps(), step, owner)

    def _finish_records(self) -> None:
        self.engine.finish_records()

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _details(self) -> dict[str, Any]:
        if self.config.method not in TRAINED:
            return {}
        return {"skipped_steps": sum(not record.applied for record in self._steps())}


def check_journal(config: RunConfig, data: TaskData, directory: RunDirectory) -> None:
    """Refuse, before weights are loaded, to resume a run with other settings, other data or fewer steps."""
    if not directory.journal.exists():
        return
    with Journal.open(directory.journal) as journal:
        header = journal.header
        num_done = sum(isinstance(record, StepRecord) for record in journal.records)
    assert_same_run(header, header_without_weights(header, config, data), may_differ_on_resume(config))
    if config.train.steps is not None and config.train.steps < num_done:
        raise UserError(
            f"run {directory.path} has {num_done} steps already, more than train.steps={config.train.steps}",
            fix=f"set train.steps={num_done} or more, or another run_dir",
        )
