"""A zeroth-order run as one of several replicas, which may come and go at any step.

All replicas append the same lines to their journals. The lowest replica leaves the quorum to evaluate and to
write snapshots, and the others go on. It brings the evaluation along when it joins again.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from lezo_ds import distributed
from lezo_ds.config import may_differ_on_resume
from lezo_ds.files import write_atomically
from lezo_ds.journal import EvaluationRecord, read_journal
from lezo_ds.replicas import FEW_LINES, Lines, Replicas, StepLostError, reaches, whole_lines
from lezo_ds.runs import records, run

logger = logging.getLogger(__name__)


class ElasticRun(run.Run):
    """The part of a replica in a run."""

    def __init__(self, *arguments: Any, replicas: Replicas) -> None:
        super().__init__(*arguments)
        self.engine.replicas = self.replicas = replicas
        replicas.num_workers = self.engine.world_size // self.engine.tensor_parallel
        self._is_away = (
            self.directory.number == 0
        )  # the first one scores the base model before it joins
        self._evaluator = ""  # address of the last replica that left to evaluate

    def _open_journal(self) -> list[EvaluationRecord]:
        path = self.directory.journal
        if not path.exists() and (lines := self._newer_lines()):
            write_atomically(path, lines.data)
            records.check_records(self.config, self.data, self.directory, self.engine.world_size)
        evaluations = super()._open_journal()
        self.replicas.journal = self._journal
        return evaluations

    def _newer_lines(self) -> Lines | None:
        """Return lines that this journal lacks, of a replica or of what one has left in this directory."""
        if lines := self.replicas.newer_lines():
            return lines
        own = whole_lines(self.directory.journal)
        later = [
            lines for lines in map(whole_lines, self.directory.journals()) if lines.startswith(own)
        ]
        longest = max(later, key=len)
        return Lines(len(own), longest[len(own) :]) if len(longest) > len(own) else None

    def _catch_up(self) -> None:
        """Do what the others have done, before asking for the quorum."""
        while lines := distributed.on_rank_zero(self._newer_lines):
            if self._take(lines) <= FEW_LINES:
                return

    def _take(self, lines: Lines) -> int:
        """Take over the lines of others and do their steps. Return the number of lines."""
        if lines.start == 0:
            distributed.on_rank_zero(lambda: self._replace_journal(lines.data))
            self.engine.load_model(None, 0)
            self._open()
            return lines.data.count(b"\n")
        journal = self._journal
        new = distributed.on_rank_zero(lambda: journal.extend(lines.data) if journal else [])
        self.engine.records += records.steps_of(new)
        self.engine.apply(self.engine.global_steps, len(self.engine.records))
        self.engine.global_steps = len(self.engine.records)
        self.evaluations += records.evaluations_of(new)
        return len(new)

    def _replace_journal(self, lines: bytes) -> None:
        assert self._journal is not None
        path = self.directory.journal
        others = path.with_name("journal.others")
        write_atomically(others, lines)
        header = read_journal(others).header
        records.assert_same_run(header, self._journal.header, may_differ_on_resume(self.config))
        logger.warning("the other replicas have another journal; this one is now %s.left", path)
        self._journal.close()
        path.replace(path.with_name(f"{path.name}.left"))
        others.replace(path)

    def _train(self, bar: tqdm[Any]) -> None:
        if self._is_away and self.engine.global_steps == 0:
            super()._evaluate_if_due()
        self._is_away = False
        self._catch_up()
        self._num_done = self.engine.global_steps
        super()._train(bar)
        while self._missing() or self.replicas.news:
            self._look_for_requests()
            if self.engine.agree_on_stop():
                raise run.Stopped
            with suppress(StepLostError):
                self._meet()
                if not (self._missing() and self._evaluate_in_turn()):
                    self._do_empty_round()
            time.sleep(0.2)

    def _train_step(self) -> dict[str, Any]:
        while True:
            try:
                self._meet()
                if self._is_over():  # with the steps of others
                    self._do_empty_round()
                    return self._values(self.engine.records[-1])
                is_checked = self.engine.global_steps % run.CHECK_EVERY == 0
                self.replicas.digest = self.engine.weights.digest() if is_checked else ""
                values = super()._train_step()
                self._record_news()
                return values
            except StepLostError as error:
                logger.info("step %d is done again: %s", self.engine.global_steps, error)

    def _is_over(self) -> bool:
        return self.engine.global_steps >= self.num_steps or self._has_lost_patience()

    def _meet(self) -> None:
        while (place := self.replicas.meet()).lines is not None:
            self._take(place.lines)
            if not place.has_left:
                return
            self._catch_up()

    def _do_empty_round(self) -> None:
        """Take part in a round after the last step, for evaluations that others bring along."""
        self.replicas.digest = ""
        self.replicas.sum([0.0, 0.0], {"waits after": str(self.engine.global_steps)})
        self._record_news()

    def _record_news(self) -> None:
        assert self.replicas.place is not None
        for values in self.replicas.place.news:
            record = EvaluationRecord(**values)
            if not self._evaluation(record.split, record.step):
                super()._record_evaluation(record)
        self.replicas.news = []

    def _record_evaluation(self, record: EvaluationRecord) -> None:
        """Bring it along: all replicas record it when this one is back."""
        self.replicas.news.append(asdict(record))

    def _evaluate(self, split: str, at: int) -> None:
        if self._is_away:
            super()._evaluate(split, at)

    def _snapshot_if_due(self) -> None:
        if self._is_away:
            super()._snapshot_if_due()

    def _evaluate_if_due(self) -> None:
        is_due = ("dev", self.engine.global_steps) in self._missing() or self._is_snapshot_due()
        if self.replicas.place is not None and is_due:
            self._evaluate_in_turn()

    def _evaluate_in_turn(self) -> bool:
        """Leave, evaluate and catch up, if this replica is the lowest. Return whether it is."""
        place, head = self.replicas.place, self.engine.global_steps
        assert place is not None
        # At the end of the run, nothing is left to do but to wait for the one that evaluates.
        is_waiting = self._is_over() and self._evaluator not in ("", *place.addresses)
        if is_waiting and distributed.on_rank_zero(lambda: reaches(self._evaluator)):
            return False
        missing = [
            (split, step) for split, step in self._missing() if step == head or self._is_over()
        ]
        self._evaluator = place.addresses[0]
        if place.position > 0:
            return False
        self.replicas.leave()
        self._is_away = True
        for split, step in missing:
            if step != self.engine.global_steps:
                self._restore(step)
            self._evaluate(split, step)
        if self.engine.global_steps != head:
            self._restore(None)
        self._snapshot_if_due()
        self._is_away = False
        self._catch_up()
        return True

    def _missing(self) -> list[tuple[str, int]]:
        """Return the splits and steps that must be evaluated by now and are not. Newest first."""
        step, every = self.engine.global_steps, self._eval_every
        recorded = {(record.split, record.step) for record in self.evaluations}
        due = {("dev", number) for number in range(0, step + 1, every)}
        if self._is_over():
            due |= {("dev", step), ("test", 0)}
            best = records.best_evaluation(self.evaluations)
            if best is not None and due <= recorded:
                due = {("test", best.step)}
        brought = {(values["split"], values["step"]) for values in self.replicas.news}
        return sorted(due - recorded - brought, key=lambda each: -each[1])

    def _look_for_requests(self) -> None:
        super()._look_for_requests()
        self.replicas.stops_all = self.writes and self.directory.stop_file.exists()
