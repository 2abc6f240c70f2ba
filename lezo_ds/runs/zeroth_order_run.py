"""A run of LeZO or MeZO, whose journal is its training state, or a run that only scores (zero_shot, icl)."""

from __future__ import annotations

import logging
from typing import Any

from lezo_ds import distributed
from lezo_ds.config import TRAINED, RunConfig, may_differ_on_resume
from lezo_ds.data.task_data import TaskData
from lezo_ds.engine import LezoEngine, scalar_bytes
from lezo_ds.errors import UserError
from lezo_ds.journal import EvaluationRecord, Journal, JournalRecord
from lezo_ds.model.snapshots import SnapshotOwner, read_manifest, snapshot_path
from lezo_ds.runs.earlier_run import set_aside_earlier_run, set_aside_foreign_snapshots
from lezo_ds.runs.header import assert_same_run, header_without_weights, journal_owner, make_header
from lezo_ds.runs.run import Run
from lezo_ds.runs.run_directory import RunDirectory
from lezo_ds.runs.screen import number
from lezo_ds.zo.records import StepRecord

logger = logging.getLogger(__name__)


class ZerothOrderRun(Run[LezoEngine]):
    """A run whose engine is a LezoEngine."""

    def __init__(
        self, config: RunConfig, data: TaskData, directory: RunDirectory, engine: LezoEngine
    ) -> None:
        super().__init__(config=config, data=data, directory=directory, engine=engine)
        self._steps: list[StepRecord] = []
        self._journal: Journal | None = None

    def _open(self) -> None:
        """Create the journal, or open it and replay it."""
        records = distributed.on_rank_zero(self._open_journal)
        self._steps = [record for record in records if isinstance(record, StepRecord)]
        self.evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
        self._announce(len(self._steps))
        self._load(None)
        self.engine.attach_journal(self._journal)
        self.engine.watch_weights()
        if self._starts_from_activations() and not self._steps:
            self._save()

    def _starts_from_activations(self) -> bool:
        # A prefix starts from the activations of a forward pass, which another machine rounds differently.
        # Replay is exact only if it starts from the very same values, so a snapshot of step 0 keeps them.
        return self.num_steps > 0 and self.config.peft.kind == "prefix"

    def _protected(self) -> tuple[int, ...]:
        return (0,) if self._starts_from_activations() else ()

    def _open_journal(self) -> tuple[JournalRecord, ...]:
        path, base = self.directory.journal, self.engine.base
        header = make_header(self.config, self.data, base.fingerprint, base.table_hash)
        if not path.exists():
            set_aside_earlier_run(self.directory)
            self._journal = Journal.create(path, header)
            return ()
        self._journal = Journal.open(path)
        assert_same_run(
            recorded=self._journal.header,
            ours=header,
            run_dir=self.directory.path,
            may_differ=may_differ_on_resume(self.config),
        )
        set_aside_foreign_snapshots(self.directory, self._owner())
        return self._journal.records

    def _owner(self) -> SnapshotOwner:
        assert self._journal is not None, "only rank 0 has the journal"
        return journal_owner(self._journal.header, self._journal.records)

    def _load(self, step: int | None) -> None:
        owner = self._owner() if self.writes else None
        self.engine.load_checkpoint(self.directory.snapshots, self._steps, step, owner)

    def _train_step(self) -> dict[str, Any]:
        batch = self.data.step_batch(self.config, self.engine.global_steps)
        record = self.engine.train_batch(batch, self.data.loss)
        self._steps.append(record)
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

    def _restore(self, step: int) -> None:
        self._load(step)

    def _finish_records(self) -> None:
        self.engine.finish_records()

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _details(self) -> dict[str, Any]:
        training = {
            "skipped_steps": sum(not record.applied for record in self._steps),
            "bytes_per_step": self._bytes_per_step(),
        }
        return {
            **(training if self.config.method in TRAINED else {}),
            "model_fingerprint": self.engine.base.fingerprint,
            "weights_digest": self.engine.weights.digest(),
        }

    def _bytes_per_step(self) -> dict[str, int] | None:
        """Return the bytes that a step communicates: gathered weights on each rank, and everything else.

        The number is not known (None) if the objective generates answers, because the number of forward
        passes then depends on the longest answer.
        """
        if self.data.objective.reads_answers:
            return None
        train, world_size = self.config.train, self.engine.world_size
        num_micro_batches = train.batch_size // train.micro_batch_size
        num_forwards = len(self.engine.passes_of_rank(0, num_micro_batches))
        parameters = self.engine.weights.parameters
        model = sum(parameter.numel * parameter.parameter.element_size() for parameter in parameters)
        is_sharded = (self.config.partition_size or world_size) > 1
        return {
            "gathered": model * num_forwards if is_sharded else 0,
            "other": scalar_bytes(self.engine.plan_format, num_micro_batches),
        }


def check_journal(config: RunConfig, data: TaskData, directory: RunDirectory) -> None:
    """Refuse, before any weights are loaded, to resume a run with another configuration or other data.

    Raises:
        UserError: the first item that differs; or the run has more steps than it is asked for.
    """
    if not directory.journal.exists():
        return
    with Journal.open(directory.journal) as journal:
        header = journal.header
        num_done = sum(isinstance(record, StepRecord) for record in journal.records)
    assert_same_run(
        recorded=header,
        ours=header_without_weights(header, config, data),
        run_dir=directory.path,
        may_differ=may_differ_on_resume(config),
    )
    if config.train.steps is not None and config.train.steps < num_done:
        raise UserError(
            f"run {directory.path} already has more steps than train.steps",
            got=f"train.steps={config.train.steps}",
            expected=f"at least {num_done}, the number of steps that are done",
            fix=f"set train.steps={num_done} or more, or give another run_dir",
        )
