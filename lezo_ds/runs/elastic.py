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
from lezo_ds.config import RunConfig
from lezo_ds.data.task_data import TaskData
from lezo_ds.engine import LezoEngine
from lezo_ds.files import write_atomically
from lezo_ds.journal import EvaluationRecord
from lezo_ds.replicas.group import reaches
from lezo_ds.replicas.lighthouse import NoQuorumError
from lezo_ds.replicas.member import FEW_LINES
from lezo_ds.replicas.quorum import Replicas, StepLostError
from lezo_ds.replicas.transport import Lines, whole_lines
from lezo_ds.runs import records
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.run import StepMetrics
from lezo_ds.runs.signals import Stopped
from lezo_ds.runs.zeroth_order import ZerothOrderRun

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.2
"""Time between rounds after the last step, in which replicas only wait for an evaluation."""


class ReplicaRun(ZerothOrderRun):
    """What one rank does of a run, as part of a replica. All have equal journals and weights.

    Attributes:
        replicas: the link to the other replicas.
    """

    engine: LezoEngine

    def __init__(
        self,
        config: RunConfig,
        data: TaskData,
        directory: RunDirectory,
        engine: LezoEngine,
        replicas: Replicas,
    ) -> None:
        super().__init__(config, data, directory, engine)
        self.replicas = replicas
        self._evaluator = ""  # address of the last replica that left to evaluate
        engine.workers = replicas
        replicas.num_workers = engine.world_size // engine.tensor_parallel
        replicas.gives_up = self._is_asked_to_stop

    def open(self) -> None:
        distributed.on_rank_zero(self._begin_with_lines_of_others)
        super().open()
        self.replicas.journal = self.journal

    def _begin_with_lines_of_others(self) -> None:
        """Take over the journal of another replica, if this one has none. For rank 0."""
        if self.directory.journal.exists():
            return
        lines = self._newer_lines()
        if lines is None:  # this is the first replica
            return
        write_atomically(self.directory.journal, lines.data)
        # `train` has checked the records of this directory, when there were none.
        records.check_records(self.config, self.data, self.directory, self.engine.world_size)

    def begin(self) -> None:
        if self.directory.number == 0:  # before it joins, so that no other replica waits
            self.evaluate("test", at=0)
            self.evaluate("dev", at=0)
        self._catch_up()
        # If the others have gone, there is nobody to tell, and this replica would train on alone.
        if distributed.on_rank_zero(self.directory.was_stopped):
            raise Stopped

    # Requests of the user.

    def look_for_requests(self) -> None:
        super().look_for_requests()
        if self._writes and self.directory.was_stopped():
            self.engine.request_stop()

    def _is_asked_to_stop(self) -> bool:
        self.look_for_requests()
        return self.engine.stop_requested

    # Rounds.

    def step(self) -> StepMetrics:
        while True:
            try:
                self.meet()
                if self._is_over():  # with the steps that were taken over
                    self._do_empty_round()
                    return self.metrics_of_last_step()
                if self.is_check_due():
                    # It takes a while, and with it replicas notice any flipped bit.
                    self.replicas.digest = self.engine.weights.digest()
                metrics = super().step()
                self._record_brought()
                return metrics
            except StepLostError as error:
                logger.info("step %d is done again: %s", self.engine.global_steps, error)

    def meet(self) -> None:
        """Join the quorum of the next round. Take over what this replica lacks. A collective."""
        self.replicas.stops_all = self.has_stop_file
        self.replicas.digest = ""
        while True:
            self.replicas.own_learning_rate = self.engine.own_learning_rate()
            try:
                role = self.replicas.meet()
            except NoQuorumError:
                self.replicas.leave()
                raise Stopped from None
            if role.lines is None:
                return
            self._take_over(role.lines)
            if not role.has_left:
                return
            self._catch_up()

    def _do_empty_round(self) -> None:
        """Take part in a round after the last step, for evaluations that others bring along."""
        # A vote and no losses. Replicas that do a step or wait after another one disagree.
        self.replicas.sum([0.0], {"waits after": str(self.engine.global_steps)})
        self._record_brought()

    def _is_over(self) -> bool:
        """Return whether no step follows. The loop of the run may not know of the newest ones."""
        return self.engine.global_steps >= self.num_steps or self.has_lost_patience()

    # Lines of other replicas.

    def _newer_lines(self) -> Lines | None:
        """Return lines that this journal lacks, of a live replica or of a journal on this disk.

        For rank 0.
        """
        lines = self.replicas.newer_lines()
        if lines is not None:
            return lines
        own = whole_lines(self.directory.journal)
        journals = self.directory.of_all_replicas(self.directory.journal.name)
        others = [whole_lines(path) for path in journals]
        longest = max((lines for lines in others if lines.startswith(own)), key=len, default=own)
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
            self.follow(lines.data)
        else:
            self.replace_journal(lines.data)
        return lines.data.count(b"\n")

    # Evaluations.

    def record(self, evaluation: EvaluationRecord) -> None:
        """Bring the evaluation along: all replicas record it in the next round of this one."""
        self.replicas.evaluations.append(evaluation)

    def _record_brought(self) -> None:
        """Record the evaluations that the replicas of this round have brought along."""
        assert self.replicas.role is not None, "there was a round"
        for evaluation in self.replicas.role.evaluations:
            if (evaluation.split, evaluation.step) not in self.evaluated():
                super().record(evaluation)
        self.replicas.evaluations = []

    def evaluate_and_save(self) -> None:
        is_missing = ("dev", self.engine.global_steps) in self.missing()
        if is_missing or self.is_snapshot_due():
            self._evaluate_in_turn()

    def _evaluate_in_turn(self) -> bool:
        """Leave, evaluate and catch up, if it is the turn of this replica. Return whether it was.

        It is the turn of the first one in the last round. All others note who that is.
        """
        role = self.replicas.role
        if role is None:  # before the first round, nobody knows who is the first
            return False
        is_over = self._is_over()
        # While there are steps, the next replica evaluates what is due next. After the last step,
        # all wait for the one that is away, as long as it lives.
        if is_over and self._evaluator not in ("", *role.addresses):
            evaluator_lives = distributed.on_rank_zero(lambda: reaches(self._evaluator))
            if evaluator_lives:
                return False
        self._evaluator = role.addresses[0]
        if role.position > 0:
            return False
        head = self.engine.global_steps
        missing = [(split, step) for split, step in self.missing() if step == head or is_over]
        self.replicas.leave()
        for split, step in missing:
            if step != self.engine.global_steps:
                self.restore(step)
            self.evaluate(split, at=step)
        if self.engine.global_steps != head:
            self.restore(head)
        self.save_if_due()  # the snapshot is of the newest step
        self._catch_up()
        return True

    def missing(self) -> list[tuple[str, int]]:
        """Return the splits and steps that must be evaluated by now and are not.

        The newest come first: the weights of that step are in memory. The order is the same on all
        ranks, for which these evaluations are collectives.
        """
        step = self.engine.global_steps
        recorded = self.evaluated()
        due = {("dev", number) for number in range(0, step + 1, self.eval_every)}
        if self._is_over():
            due |= {("dev", step), ("test", 0)}
            best = records.best_evaluation(self.evaluations)
            if best is not None and due <= recorded:  # only then is the best step known
                due = {("test", best.step)}
        brought = {(evaluation.split, evaluation.step) for evaluation in self.replicas.evaluations}
        missing = due - recorded - brought
        return sorted(missing, key=lambda split_and_step: (-split_and_step[1], split_and_step[0]))

    def finish(self) -> None:
        while self.missing() or self.replicas.evaluations:
            self.stop_if_requested()
            with suppress(StepLostError):
                self.meet()
                has_left = bool(self.missing()) and self._evaluate_in_turn()
                if not has_left:
                    self._do_empty_round()
            time.sleep(_PAUSE_SECONDS)
