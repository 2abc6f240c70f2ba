"""LeZO and MeZO in a run, and runs that only score: the journal is the training state.

A replay of the journal gives back the weights after any step, so a snapshot only saves time. This
is journal.jsonl of a run with train.eval_every=2. Rank 0 writes it:

    header                                the inputs of the run
    evaluation of test after 0 steps      the base model
    evaluation of dev after 0 steps
    step 0                                on the disk before the update of step 1 begins
    step 1
    evaluation of dev after 2 steps       on the disk before step 2 begins
    step 2
    ...

A run that only scores is the simplest case. Its journal has a header, one evaluation and no steps.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from tqdm import tqdm

from lezo_ds import distributed
from lezo_ds.checkpoints.snapshots import SnapshotOwner
from lezo_ds.config import may_differ_on_resume
from lezo_ds.engine import LezoEngine, ReplayEngine
from lezo_ds.files import write_atomically
from lezo_ds.journal import EvaluationRecord, Journal, read_journal
from lezo_ds.runs import records
from lezo_ds.runs.run import Run, StepMetrics
from lezo_ds.zo.records import StepRecord

logger = logging.getLogger(__name__)


class ZerothOrderRun(Run):
    """Training by forward passes, recorded in a journal; or no training, if the run only scores.

    Attributes:
        journal: on rank 0, the run's journal once it is open; None on other ranks.
    """

    engine: ReplayEngine
    journal: Journal | None = None

    def open(self) -> None:
        self.evaluations = distributed.on_rank_zero(self._open_journal)
        self.restore(None)
        self.engine.journal = self.journal
        self.engine.watch_weights()
        if self.starts_from_snapshot() and self.engine.global_steps == 0:
            self.save()  # unless it is there

    def _open_journal(self) -> list[EvaluationRecord]:
        """Open the journal, or start one, and return its evaluations. For rank 0."""
        path = self.directory.journal
        if not path.exists():
            self.journal = Journal.create(path, self.prepare_start())
            return []
        self.journal = Journal.open(path)
        self.prepare_resumption(self.journal.header, len(self._recorded_steps()))
        return records.evaluations_of(self.journal.records)

    def train(self, bar: tqdm[Any]) -> None:
        self.cross_check()
        while not self.do_what_is_due():
            self.count_step(self.step(), bar)

    def step(self) -> StepMetrics:
        """Bring the run forward by a step, and return the numbers of the newest step."""
        assert isinstance(self.engine, LezoEngine), "a run that only scores has no steps"
        began = time.monotonic()
        step = self.engine.global_steps
        self.engine.train_batch(self.batches.at(step), self.data.loss)
        seconds = time.monotonic() - began
        num_tokens = self.data.num_tokens(self.config, step)
        return {**self.metrics_of_last_step(), "tokens_per_second": round(num_tokens / seconds, 1)}

    def metrics_of_last_step(self) -> StepMetrics:
        """Return the numbers of the newest step, done here or elsewhere. Warn if it was skipped."""
        record = self.engine.records[-1]
        gradient = None
        if record.projected_grads:
            gradient = sum(record.projected_grads) / len(record.projected_grads)
        if not record.applied and distributed.rank() == 0:
            logger.warning("step %d skipped: a loss or an estimate is not finite", record.step)
        return {
            "loss": record.loss,
            "projected_gradient": gradient,
            "learning_rate": record.learning_rate,
            "applied": record.applied,
        }

    def record(self, evaluation: EvaluationRecord) -> None:
        self.evaluations.append(evaluation)
        if self.journal is not None:
            self.journal.append(evaluation)

    def check(self) -> None:
        self.engine.check_weights()
        self.engine.finish_records()

    def restore(self, step: int | None) -> None:
        """Bring the engine to the exact weights after `step` steps; None: after all recorded."""
        owner = None if self.journal is None else self.owner()
        steps = self._recorded_steps()
        self.engine.load_checkpoint(self.directory.snapshots, steps, step, owner)

    def protected_steps(self, *, is_finished: bool) -> tuple[int, ...]:
        return (0,) if self.starts_from_snapshot() else ()

    def num_skipped_steps(self) -> int:
        return sum(1 for record in self._recorded_steps() if not record.applied)

    def num_flat_steps(self) -> int:
        applied = [record for record in self._recorded_steps() if record.applied]
        return sum(1 for record in applied if not any(record.projected_grads))

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()

    def _recorded_steps(self) -> list[StepRecord]:
        """Return all steps of the journal on rank 0, and none elsewhere."""
        if self.journal is None:
            return []
        return records.steps_of(self.journal.records)

    def owner(self) -> SnapshotOwner:
        journal = self._journal_of_rank_zero()
        return records.owner_of(journal.header, journal.step_checksums)

    def _journal_of_rank_zero(self) -> Journal:
        assert self.journal is not None, "only rank 0 has the journal"
        return self.journal

    # What a replica takes over from others (elastic.py).

    def follow(self, lines: bytes) -> None:
        """Append the next lines of another copy of the journal; do their steps. A collective."""
        new = distributed.on_rank_zero(lambda: self._journal_of_rank_zero().extend(lines))
        self.engine.records += records.steps_of(new)
        self.engine.apply(len(self.engine.records))
        self.evaluations += records.evaluations_of(new)

    def replace_journal(self, lines: bytes) -> None:
        """Go on with another journal of the same run, and do its steps. A collective.

        The old one stays as journal.jsonl.left.
        """
        distributed.on_rank_zero(lambda: self._swap_journals(lines))
        self.engine.load_model(None, 0)
        self.open()

    def _swap_journals(self, lines: bytes) -> None:
        journal = self._journal_of_rank_zero()
        path = self.directory.journal
        other = path.with_name("journal.others")
        write_atomically(other, lines)
        header = read_journal(other).header
        records.assert_same_run(header, journal.header, may_differ_on_resume(self.config))
        logger.warning("the other replicas have another journal; this one is now %s.left", path)
        journal.close()
        # A crash between the two renames leaves no journal, and the next start takes over lines.
        path.replace(path.with_name(f"{path.name}.left"))
        other.replace(path)
