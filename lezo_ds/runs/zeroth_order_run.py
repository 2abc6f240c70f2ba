"""A run of LeZO or MeZO: its journal is the training state. Without steps (zero_shot, icl) it only scores."""

from __future__ import annotations

import logging
from typing import Any

from lezo_ds import distributed
from lezo_ds.config import RESUME_MAY_DIFFER, TRAINED, RunConfig
from lezo_ds.data.task_data import TaskData
from lezo_ds.engine.lezo_engine import LezoEngine
from lezo_ds.engine.step_plan import scalar_bytes
from lezo_ds.journal import EvaluationRecord, Header, Journal, StepRecord
from lezo_ds.runs.header import assert_same_run, make_header
from lezo_ds.runs.run import Run
from lezo_ds.runs.run_directory import RunDirectory

logger = logging.getLogger(__name__)


class ZerothOrderRun(Run):
    """A run whose engine is a LezoEngine."""

    def __init__(
        self, config: RunConfig, data: TaskData, directory: RunDirectory, engine: LezoEngine
    ) -> None:
        super().__init__(config, data, directory, engine)
        self._lezo = engine
        self._steps: list[StepRecord] = []
        self._journal: Journal | None = None

    def _open(self) -> None:
        """Create the journal, or open it and bring the weights to where it ends."""
        base = self._lezo.base
        header = make_header(self.config, base.fingerprint, base.table_hash)
        records = distributed.on_rank_zero(lambda: self._open_journal(header))
        self._steps = [record for record in records if isinstance(record, StepRecord)]
        self.evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
        self._lezo.load_checkpoint(self.directory.snapshots, self._steps)
        self._lezo.attach_journal(self._journal)
        self._lezo.watch_weights()
        if self._starts_from_activations() and not self._steps:
            self._save()

    def _starts_from_activations(self) -> bool:
        """Whether the first values, too, are only exact in a snapshot: another machine rounds otherwise."""
        return self.num_steps > 0 and self.config.peft.kind == "prefix"

    def _protected(self) -> tuple[int, ...]:
        return (0,) if self._starts_from_activations() else ()

    def _open_journal(self, header: Header) -> tuple[StepRecord | EvaluationRecord, ...]:
        path = self.directory.journal
        if not path.exists():
            self._journal = Journal.create(path, header)
            return ()
        self._journal = Journal.open(path)
        assert_same_run(self._journal.header, header, self.directory.path, RESUME_MAY_DIFFER)
        return self._journal.records

    def _train_step(self) -> dict[str, Any]:
        batch = self.data.batch(self.config, self._lezo.global_steps)
        record = self._lezo.train_batch(batch, self.data.loss)
        self._steps.append(record)
        gradients = record.projected_grads
        gradient = sum(gradients) / len(gradients) if gradients else None
        if not record.applied and self.writes:
            logger.warning(
                "step %d skipped: loss %s, projected gradient %s", record.step, record.loss, gradient
            )
        return {"loss": record.loss, "projected_gradient": gradient, "applied": record.applied}

    def _record_evaluation(self, record: EvaluationRecord) -> None:
        if self._journal is not None:
            self._journal.append(record)

    def _check(self) -> None:
        self._lezo.check_weights()

    def _save(self) -> None:
        self._lezo.save_checkpoint(self.directory.snapshots)

    def _restore(self, step: int) -> None:
        self._lezo.load_checkpoint(self.directory.snapshots, self._steps, step)

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
            "model_fingerprint": self._lezo.base.fingerprint,
            "weights_digest": self._lezo.weights.digest(),
        }

    def _bytes_per_step(self) -> dict[str, int] | None:
        """Return what a step sends: gathered weights (each rank builds them), and everything else.

        None where the objective reads answers: they take as many forward passes as the longest has tokens.
        """
        if self.data.objective.reads_answers:
            return None
        config, parameters = self.config, self._lezo.weights.parameters
        train = config.train
        num_passes = train.batch_size // train.micro_batch_size * config.zo.directions
        num_forwards = num_passes // self._lezo.world_size * (1 if config.zo.forward == "dual" else 2)
        model = sum(p.numel * p.parameter.element_size() for p in parameters)
        return {
            "gathered": model * num_forwards if (config.partition_size or self._lezo.world_size) > 1 else 0,
            "other": scalar_bytes(num_passes),
        }


def check_journal(config: RunConfig, directory: RunDirectory) -> None:
    """Refuse, before any weights load, to resume a run that was begun with another configuration."""
    if not directory.journal.exists():
        return
    with Journal.open(directory.journal) as journal:
        header = journal.header
    # What needs the weights is taken from the journal here, and compared once they are loaded.
    ours = make_header(config, header.model_fingerprint, header.parameter_table_hash)
    assert_same_run(header, ours, directory.path, RESUME_MAY_DIFFER)
