"""A zeroth-order run as one of several replicas, which may come and go at any step.

A replica is one launch, with the base weights and a journal of its own. All replicas append the
same lines to their journals, so all have the same weights. In a round, the replicas of a quorum do
a step together. The first of them leaves the quorum to evaluate and to write snapshots, and the
others go on. It brings the evaluation along when it comes back, and all record it in the same
round:

    replica 0    round 9    evaluates, takes over 10 and 11    round 12
    replica 1    round 9    round 10         round 11          round 12
    journals     step 9     step 10          step 11           step 12, evaluation after 10

A replica that lacks lines takes them over from another one, and applies their steps as a replay
does.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from lezo_ds import distributed
from lezo_ds.files import write_atomically
from lezo_ds.journal import EvaluationRecord
from lezo_ds.replicas import FEW_LINES, Lines, Replicas, StepLostError, reaches, whole_lines
from lezo_ds.runs import records
from lezo_ds.runs.membership import Membership
from lezo_ds.runs.method import StepMetrics
from lezo_ds.runs.run import Run
from lezo_ds.runs.signals import Stopped
from lezo_ds.runs.zeroth_order import ZerothOrderMethod

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.2
"""Time between rounds after the last step, in which replicas only wait for an evaluation."""


class ReplicaMembership(Membership):
    """The membership of one replica.

    Args:
        replicas: the link to the other replicas.
        method: that of this run, whose journal and weights the replicas keep equal.
    """

    def __init__(self, replicas: Replicas, method: ZerothOrderMethod) -> None:
        self._replicas = replicas
        self._method = method
        self._engine = method.engine
        self._directory = method.directory
        self._evaluator = ""  # address of the last replica that left to evaluate
        self._engine.replicas = replicas
        replicas.num_workers = self._engine.world_size // self._engine.tensor_parallel

    def open(self, run: Run) -> None:
        distributed.on_rank_zero(self._begin_with_lines_of_others)
        self._method.open()
        self._replicas.journal = self._method.journal

    def _begin_with_lines_of_others(self) -> None:
        """Take over the journal of another replica, if this one has none. For rank 0."""
        if self._directory.journal.exists():
            return
        lines = self._newer_lines()
        if lines is None:  # this is the first replica
            return
        write_atomically(self._directory.journal, lines.data)
        # `train` has checked the records of this directory, when there were none.
        method = self._method
        num_ranks = self._engine.world_size
        records.check_records(method.config, method.data, self._directory, num_ranks)

    def begin(self, run: Run) -> None:
        if self._directory.number == 0:  # before it joins, so that no other replica waits
            run.evaluate("test", at=0)
            run.evaluate("dev", at=0)
        self._catch_up()

    # Rounds.

    def step(self, run: Run) -> StepMetrics:
        while True:
            try:
                return self._do_round(run)
            except StepLostError as error:
                logger.info("step %d is done again: %s", self._engine.global_steps, error)

    def _do_round(self, run: Run) -> StepMetrics:
        self.meet()
        if self._is_over(run):  # with the steps that were taken over
            self._do_empty_round(run)
            return self._method.metrics_of_last_step()
        self._replicas.stops_all = run.has_stop_file
        # A digest of all weights takes a while, and with it replicas notice any flipped bit.
        self._replicas.digest = self._engine.weights.digest() if run.is_check_due() else ""
        metrics = self._method.step()
        self._record_brought(run)
        return metrics

    def meet(self) -> None:
        """Join the quorum of the next round. Take over what this replica lacks. A collective."""
        while True:
            place = self._replicas.meet()
            if place.lines is None:
                return
            self._take_over(place.lines)
            if not place.has_left:
                return
            self._catch_up()

    def _do_empty_round(self, run: Run) -> None:
        """Take part in a round after the last step, for evaluations that others bring along."""
        self._replicas.stops_all = run.has_stop_file
        self._replicas.digest = ""
        # Two votes and no losses. Replicas that do a step or wait after another one disagree.
        self._replicas.sum([0.0, 0.0], {"waits after": str(self._engine.global_steps)})
        self._record_brought(run)

    def _is_over(self, run: Run) -> bool:
        """Return whether no step follows. The loop of the run may not know of the newest ones."""
        return self._engine.global_steps >= run.num_steps or run.has_lost_patience()

    # Lines of other replicas.

    def _newer_lines(self) -> Lines | None:
        """Return lines that this journal lacks, of a live replica or of a journal on this disk.

        For rank 0.
        """
        lines = self._replicas.newer_lines()
        if lines is not None:
            return lines
        own = whole_lines(self._directory.journal)
        longest = own
        for path in self._directory.journals():
            other = whole_lines(path)
            if other.startswith(own) and len(other) > len(longest):
                longest = other
        if longest == own:
            return None
        return Lines(len(own), longest[len(own) :])

    def _catch_up(self) -> None:
        """Do what the others have done, out of the quorum, until this replica is close to them."""
        while True:
            lines = distributed.on_rank_zero(self._newer_lines)
            if lines is None or self._take_over(lines) <= FEW_LINES:
                return

    def _take_over(self, lines: Lines) -> int:
        """Append lines of others, and do their steps. Return the number of lines."""
        if lines.start > 0:
            return self._method.follow(lines.data)
        self._method.replace_journal(lines.data)
        self._replicas.journal = self._method.journal
        return lines.data.count(b"\n")

    # Evaluations.

    def record(self, run: Run, evaluation: EvaluationRecord) -> None:
        """Bring the evaluation along: all replicas record it in the next round of this one."""
        self._replicas.evaluations.append(evaluation)

    def _record_brought(self, run: Run) -> None:
        """Record the evaluations that the replicas of this round have brought along."""
        assert self._replicas.place is not None, "there was a round"
        for evaluation in self._replicas.place.evaluations:
            if run.evaluation_of(evaluation.split, evaluation.step) is None:
                self._method.record(evaluation)
        self._replicas.evaluations = []

    def evaluate_and_save(self, run: Run) -> None:
        is_missing = ("dev", self._engine.global_steps) in self._missing(run)
        is_due = is_missing or run.is_snapshot_due()
        # Before the first round, nobody knows who is the first of the replicas.
        if self._replicas.place is not None and is_due:
            self._evaluate_in_turn(run)

    def _evaluate_in_turn(self, run: Run) -> bool:
        """Leave, evaluate and catch up, if it is the turn of this replica. Return whether it was.

        It is the turn of the first one in the last round. All others note who that is.
        """
        place = self._replicas.place
        assert place is not None, "there was a round"
        is_over = self._is_over(run)
        is_evaluator_away = self._evaluator not in ("", *place.addresses)
        # While there are steps, the next replica evaluates what is due next. After the last step,
        # all wait for the one that is away, as long as it lives.
        if is_over and is_evaluator_away:
            evaluator_lives = distributed.on_rank_zero(lambda: reaches(self._evaluator))
            if evaluator_lives:
                return False
        self._evaluator = place.addresses[0]
        if place.position > 0:
            return False
        head = self._engine.global_steps
        missing = [(split, step) for split, step in self._missing(run) if step == head or is_over]
        self._replicas.leave()
        for split, step in missing:
            if step != self._engine.global_steps:
                self._method.restore(step)
            run.evaluate(split, at=step)
        if self._engine.global_steps != head:
            self._method.restore(head)
        run.save_if_due()  # the snapshot is of the newest step
        self._catch_up()
        return True

    def _missing(self, run: Run) -> list[tuple[str, int]]:
        """Return the splits and steps that must be evaluated by now and are not.

        The newest come first: the weights of that step are in memory. The order is the same on all
        ranks, for which these evaluations are collectives.
        """
        step = self._engine.global_steps
        evaluations = self._method.evaluations
        recorded = {(evaluation.split, evaluation.step) for evaluation in evaluations}
        due = {("dev", number) for number in range(0, step + 1, run.eval_every)}
        if self._is_over(run):
            due |= {("dev", step), ("test", 0)}
            best = records.best_evaluation(evaluations)
            if best is not None and due <= recorded:  # only then is the best step known
                due = {("test", best.step)}
        brought = {(evaluation.split, evaluation.step) for evaluation in self._replicas.evaluations}
        missing = due - recorded - brought
        return sorted(missing, key=lambda split_and_step: (-split_and_step[1], split_and_step[0]))

    def finish(self, run: Run) -> None:
        while self._missing(run) or self._replicas.evaluations:
            run.look_for_requests()
            if self._engine.agree_on_stop():
                raise Stopped
            with suppress(StepLostError):
                self.meet()
                has_left = bool(self._missing(run)) and self._evaluate_in_turn(run)
                if not has_left:
                    self._do_empty_round(run)
            time.sleep(_PAUSE_SECONDS)
