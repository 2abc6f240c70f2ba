"""A run: evaluate, train, write snapshots, and score the best step.

A run is a journal, and a replay of the journal gives back the weights after any step, so a snapshot
only saves time. This is journal.jsonl of a run with train.eval_every=2. Rank 0 writes it:

    header                                the inputs of the run
    evaluation of test after 0 steps      the base model
    evaluation of dev after 0 steps
    step 0                                on the disk before the update of step 1 begins
    step 1
    evaluation of dev after 2 steps       on the disk before step 2 begins
    step 2
    ...

A launch is what one command starts: one rank or many. Most runs have one launch, which does at once
what is due. With `elastic.lighthouse`, several launches do the steps of a run together, and their
journals have the same lines. `engine.workers` is their source (distributed/workers.py). In a round,
the launches of a quorum do a step together. The first of them leaves to evaluate and to write
snapshots, and the others go on. It brings the evaluation along when it comes back, and all record
it in the same round:

    replica 0    round 9    evaluates, takes over 10 and 11    round 12
    replica 1    round 9    round 10         round 11          round 12
    journals     step 9     step 10          step 11           step 12, evaluation after 10

Each rank executes this. (c) marks a collective: a rank that does not get there hangs all others, so
each decision depends only on what all ranks know. Rank 0 writes the files.

    open                             (c)  the journal, the weights to resume with
    cut metrics.jsonl and samples.jsonl, write config.yaml
    cross_check                      (c)  a training pass against the model alone
    begin                            (c)  meet other launches
    repeat
        check                        (c)  every 100 steps
        evaluate_and_save            (c)  what is due; at step 0, the base model on both splits
        leave the loop                    after the last step, or when train.patience has run out
        raise Stopped                     if the votes in the last all-reduce ask for it
        look for requests                 they become votes of this rank in the next all-reduce
        step                         (c)
        write metrics.jsonl, show progress
    finish                           (c)  score the step with the lowest validation loss
    restore                          (c)  this step, if another launch has scored it
    digest of the weights            (c)  for the results
    check                            (c)
    write results.json, remove snapshots that nobody wants, close

An evaluation is

    check                            (c)
    repeat for each batch
        look for requests
        vote                         (c)  raise Stopped if any rank asks for it
        forward pass                 (c)
    write predictions/, metrics.jsonl, samples.jsonl
    record                           (c)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lezo_ds import distributed
from lezo_ds.checkpoints.snapshots import (
    SnapshotOwner,
    own_snapshots,
    prune_snapshots,
    read_manifest,
    snapshot_path,
)
from lezo_ds.config import RunConfig, eval_every, is_replayable, may_differ_on_resume
from lezo_ds.data.metrics import LabelScore
from lezo_ds.data.prefetch import StepBatches
from lezo_ds.data.score import EvaluationResult, evaluate, prediction_rows
from lezo_ds.data.task_data import TaskData
from lezo_ds.distributed.monitors import Monitors
from lezo_ds.distributed.workers import Lines, NoQuorumError, StepLostError
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import last_step
from lezo_ds.files import write_atomically
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.journal import EvaluationRecord, Journal, read_journal
from lezo_ds.runs import records
from lezo_ds.runs.cross_check import cross_check
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.evaluations import (
    Numbers,
    best_evaluation,
    evaluation_record,
    evaluations_of,
    is_worse_than_base,
    numbers_of,
    refuse_unjudged,
    stopping_step,
)
from lezo_ds.runs.opening import results_of
from lezo_ds.runs.results import RunResults, method_name, peak_memory_bytes
from lezo_ds.runs.screen import (
    evaluation_line,
    number,
    progress_bar,
    samples_line,
    unclocked,
)
from lezo_ds.runs.signals import Stopped, any_ended, launchers, on_stop_signals
from lezo_ds.zo.records import StepRecord

logger = logging.getLogger(__name__)

CHECK_EVERY = 100
"""Steps between checks that the weights of each rank are the result of the steps so far."""
_PAUSE_SECONDS = 0.2
"""Time between rounds after the last step, in which launches only wait for an evaluation."""


class Run:
    """What one rank does of a run.

    The head of this module has the order of the calls. `begin`, `evaluate_and_save`, `step` and
    `finish` may raise `Stopped`.

    Attributes:
        config: the configuration of the run.
        data: the encoded splits, the metric and the objective.
        batches: the batches of the steps; a thread lays out the next one.
        directory: where rank 0 writes.
        monitors: what shows the numbers of the run elsewhere.
        engine: the sharded model. `open` brings it to the step at which the run resumes.
        journal: on rank 0, the run's journal once it is open; None on other ranks.
        evaluations: all recorded evaluations, oldest first, the same on every rank.
        num_steps: number of steps to do.
        num_done: number of steps done. `engine.global_steps` goes back when an earlier step is
            restored, and this does not.
        eval_every: number of steps between validations.
        has_stop_file: whether rank 0 found the file STOP when it looked last.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TaskData,
        directory: RunDirectory,
        engine: LezoEngine,
        monitors: Monitors,
    ) -> None:
        self.config = config
        self.data = data
        self.batches = StepBatches(data, config)
        self.directory = directory
        self.engine = engine
        self.monitors = monitors
        self.journal: Journal | None = None
        self.evaluations: list[EvaluationRecord] = []
        self.num_steps = config.train.steps or 0
        self.num_done = 0
        self.eval_every = eval_every(config)
        self.has_stop_file = False
        self._writes = engine.global_rank == 0
        self._launchers = launchers()
        self._by_label: dict[int, Mapping[str, LabelScore] | None] = {}  # by the step of a test
        self._earlier: RunResults | None = None  # of an earlier process of the run
        self._began = time.monotonic()  # earlier by the seconds that earlier processes have taken

    def execute(self) -> RunResults:
        """Run to the end, or until all ranks agree to stop, and return the results."""
        with distributed.lost_ranks_reported(lambda: f"last good step: {last_step(self.num_done)}"):
            self.open()
            self._earlier = RunResults.read(self.directory.results)
            if self._earlier is not None:
                self._by_label[self._earlier.best_step or 0] = self._earlier.by_label
            if self._writes:
                self._prune_snapshots(least=1)  # a run resumes from the newest
                seconds = self.directory.cut_logs(self.num_done, self.evaluated())
                self._began = time.monotonic() - seconds
                self.directory.write_config(self.config)
            # The handler only sets a flag, which is this rank's vote in the next all-reduce. All
            # ranks thus stop after the same step, whichever of them got the signal.
            with on_stop_signals(lambda _: self.engine.request_stop()):
                is_finished = self._run_to_end()
            results = self._results(is_finished=is_finished)
            self.check()  # before the digest of these weights is written
            if self._writes:
                self._close(results)
            return results

    def _run_to_end(self) -> bool:
        """Do everything that is left. Return whether the run finished, or was asked to stop."""
        if self.num_done < self.num_steps:
            rows = self.data.step_rows(self.config, self.num_done)
            cross_check(self.engine, self.data, self.config, rows)
        try:
            self.begin()
            bar = progress_bar(self.num_steps, num_done=self.num_done, is_shown=self._writes)
            with logging_redirect_tqdm(), bar:  # log lines go above the progress bar
                while not unclocked(bar, self.do_what_is_due):
                    self.count_step(self.step(), bar)
                self.finish()
        except Stopped:  # from the loop, or from inside an evaluation
            return False
        best = best_evaluation(self.evaluations)
        if best is not None and best.step != self.engine.global_steps:
            self.restore(best.step)
        return True

    def _close(self, results: RunResults) -> None:
        """Write the results, and end the files of the run. For rank 0."""
        self.directory.write_json(self.directory.results, asdict(results))
        if results.finished:
            self._prune_snapshots(least=0)
        if not self.engine.workers.are_shared:  # else other replicas have yet to find the file
            self.directory.stop_file.unlink(missing_ok=True)
        self._own_journal().close()

    # The journal.

    def open(self) -> None:
        """Open or start the journal, and bring the engine to its last step. A collective."""
        self.evaluations = distributed.on_rank_zero(self._open_journal)
        self.restore(None)
        self.num_done = self.engine.global_steps
        self.engine.journal = self.journal
        self.engine.workers.journal = self.journal
        self.engine.workers.gives_up = self._is_asked_to_stop
        self.engine.watch_weights()
        if self.num_done == 0 and not is_replayable(self.config):
            self.save()  # unless it is there

    def _open_journal(self) -> list[EvaluationRecord]:
        """Open the journal, or start one, and return its evaluations. For rank 0."""
        base = self.engine.base
        self.journal = records.open_journal(self.directory, self.config, self.data, base)
        num_steps = len(self._recorded_steps())
        if num_steps > 0:  # loading or replaying them may take a while
            logger.info("resuming at step %d of %d", num_steps, self.num_steps)
        root = self.directory.snapshots
        _, foreign_steps = own_snapshots(root, self._owner())
        self.directory.set_aside([snapshot_path(root, step) for step in foreign_steps])
        return evaluations_of(self.journal.records)

    def restore(self, step: int | None) -> None:
        """Bring the engine to the exact weights after `step` steps; None: after all recorded.

        A collective.
        """
        owner = None if self.journal is None else self._owner()
        steps = self._recorded_steps()
        self.engine.load_checkpoint(self.directory.snapshots, steps, step, owner)

    def record(self, evaluation: EvaluationRecord) -> None:
        """Record an evaluation of this launch: at once, or in its next round with others."""
        self.engine.workers.evaluations.append(evaluation)
        self._record_brought()

    def _record_brought(self) -> None:
        for evaluation in self.engine.workers.brought():
            if (evaluation.split, evaluation.step) not in self.evaluated():
                self.evaluations.append(evaluation)
                if self.journal is not None:
                    self.journal.append(evaluation)

    def _take_over(self, lines: Lines) -> None:
        """Append lines of another copy of the journal, and do their steps. A collective."""
        if lines.start == 0:
            distributed.on_rank_zero(lambda: self._replace_journal(lines.data))
            self.engine.load_model(None, 0)
            self.open()
            return
        new = distributed.on_rank_zero(lambda: self._own_journal().extend(lines.data))
        self.engine.records += records.steps_of(new)
        self.engine.apply(len(self.engine.records))
        self.evaluations += evaluations_of(new)
        self.num_done = max(self.num_done, self.engine.global_steps)

    def _replace_journal(self, lines: bytes) -> None:
        """Take another journal of the same run. The old one stays as journal.jsonl.left."""
        journal = self._own_journal()
        path = self.directory.journal
        other = path.with_name("journal.others")
        write_atomically(other, lines)
        header = read_journal(other).header
        records.assert_same_run(header, journal.header, may_differ_on_resume(self.config))
        journal.close()
        left = path.with_name(f"{path.name}.left")
        write_atomically(left, path.read_bytes())
        other.replace(path)  # a crash leaves the one journal or the other
        logger.warning("the other replicas have another journal; the former is now %s", left)

    def _own_journal(self) -> Journal:
        assert self.journal is not None, "only rank 0 has the journal"
        return self.journal

    def _recorded_steps(self) -> list[StepRecord]:
        """Return all steps of the journal on rank 0, and none elsewhere."""
        return [] if self.journal is None else records.steps_of(self.journal.records)

    def _owner(self) -> SnapshotOwner:
        """Return what the snapshots of this run have in their manifests. For rank 0."""
        return records.owner_of(self._own_journal())

    # Steps.

    def begin(self) -> None:
        """Meet the other launches once, to learn where lines are and who evaluates. A collective.

        They lose this round, and repeat it.
        """
        lines = self._meet()
        if lines is not None:
            self._take_over(lines)
        self.engine.workers.leave()
        # If the others have gone, there is nobody to tell, and this launch would train on alone.
        self.stop_if_requested()

    def do_what_is_due(self) -> bool:
        """Do what is due between two steps, and return whether no step follows. A collective.

        Raises:
            Stopped: all ranks agreed to stop.
        """
        if self.num_done > 0 and self.is_check_due():
            self.check()
        self.evaluate_and_save()
        if self.is_over():
            return True
        # The votes were part of the last step's all-reduce. A snapshot that is due is written now.
        if self.engine.stop_agreed:
            raise Stopped
        self.look_for_requests()
        return False

    def is_over(self) -> bool:
        """Return whether no step follows."""
        return self.num_done >= self.num_steps or self.has_lost_patience()

    def step(self) -> Numbers:
        """Bring the run forward by a step, and return the numbers of the newest one."""
        while True:
            self._join_round()
            try:
                speed = self._do_round()
                return {**self.metrics_of_last_step(), **speed}
            except StepLostError as error:
                logger.info("step %d is done again: %s", self.num_done, error)

    def _meet(self) -> Lines | None:
        """Return what `Workers.meet` does. Stopped: it gives up."""
        workers = self.engine.workers
        try:
            return workers.meet(self.engine.own_learning_rate(), stops_all=self.has_stop_file)
        except NoQuorumError:
            workers.leave()
            raise Stopped from None

    def _join_round(self) -> None:
        """Take over what others have done, until this launch takes part in the next round."""
        while True:
            lines = self._meet()
            if lines is None:
                return
            self._take_over(lines)

    def _do_round(self) -> Numbers:
        """Do a step with all workers, or none after the last step. Return its speed.

        Raises:
            StepLostError: a launch has left. Nothing has changed.
        """
        workers = self.engine.workers
        speed: Numbers = {}
        if self.is_over():  # with the steps that were taken over; evaluations may be brought along
            # A vote and no losses. Launches that do a step or wait after another one disagree.
            workers.sum([0.0], {"waits after": str(self.num_done)})
        else:
            if self.is_check_due():
                # It takes a while, and with it launches notice any flipped bit.
                workers.compare(self.engine.weights.digest)
            began = time.monotonic()
            self.engine.train_batch(self.batches.at(self.num_done), self.data.loss)
            num_tokens = self.data.num_tokens(self.config, self.num_done)
            speed["tokens_per_second"] = round(num_tokens / (time.monotonic() - began), 1)
            self.num_done = self.engine.global_steps
        self._record_brought()
        return speed

    def metrics_of_last_step(self) -> Numbers:
        """Return the numbers of the newest step, done here or elsewhere. Warn if it was skipped."""
        record = self.engine.records[-1]
        gradient = None
        if record.projected_grads:
            gradient = sum(record.projected_grads) / len(record.projected_grads)
        if not record.applied and self._writes:
            logger.warning("step %d skipped: a loss or an estimate is not finite", record.step)
        return {
            "loss": record.loss,
            "projected_gradient": gradient,
            "learning_rate": record.learning_rate,
            "applied": record.applied,
        }

    def count_step(self, metrics: Numbers, bar: tqdm[Any]) -> None:
        """Log and show a step that was done."""
        self._log_metrics(metrics)
        bar.set_postfix({"loss": number(metrics["loss"])}, refresh=False)
        bar.update(self.num_done - bar.n)

    def finish(self) -> None:
        """Do what is left of the evaluations, or wait until others have. A collective."""
        while self.missing() or self.engine.workers.evaluations:
            self.stop_if_requested()
            if self.engine.workers.are_shared:
                self._join_round()
            if not (self.missing() and self._evaluate_in_turn()):
                try:
                    self._do_round()
                except StepLostError as error:
                    logger.info("the replicas meet again: %s", error)
                time.sleep(_PAUSE_SECONDS)

    def check(self) -> None:
        """Check the weights, and wait until the journal is on the disk. A collective.

        Raises:
            DesyncError: the weights of a rank are not what the steps made of them.
            JournalError: the records of the last steps cannot be written.
        """
        self.engine.check_weights()
        self.engine.finish_records()

    # What is due.

    def is_check_due(self) -> bool:
        """Return whether the weights are to be checked at the current step."""
        return self.num_done % CHECK_EVERY == 0

    def is_snapshot_due(self) -> bool:
        """Return whether a snapshot of the current step is due."""
        if self.num_done == 0:
            return False
        if self.is_over():
            return True
        every = self.config.train.snapshot_every
        if every is None:
            every = self.eval_every
        return every > 0 and self.num_done % every == 0

    def has_lost_patience(self) -> bool:
        """Return whether train.patience ends the run: too many validations without progress."""
        stop = stopping_step(self.evaluations, self.config.train.patience)
        return stop is not None and stop <= self.num_done

    def missing(self) -> list[tuple[str, int]]:
        """Return the splits and steps that must be evaluated by now and are not.

        The newest come first: the weights of that step are in memory. The order is the same on all
        ranks, for which these evaluations are collectives. A launch may have left the evaluations
        of earlier steps to others.
        """
        head = self.num_done
        workers = self.engine.workers
        recorded = self.evaluated()
        first = 0 if workers.are_shared else head
        due = {("dev", step) for step in range(first, head + 1) if step % self.eval_every == 0}
        if head == 0 or self.is_over():
            due |= {("dev", head), ("test", 0)}
        best = best_evaluation(self.evaluations)
        if self.is_over() and best is not None and due <= recorded:  # else the best is not known
            due = {("test", best.step)}
        brought = {(evaluation.split, evaluation.step) for evaluation in workers.evaluations}
        return sorted(due - recorded - brought, key=lambda each: each[::-1], reverse=True)

    def evaluate_and_save(self) -> None:
        """Do the evaluation and write the snapshot that are due at this step, in turn."""
        is_missing = ("dev", self.num_done) in self.missing()
        if is_missing or self.is_snapshot_due():
            self._evaluate_in_turn()

    def _evaluate_in_turn(self) -> bool:
        """Evaluate what is missing, if it is the turn of this launch. Return whether it was."""
        head = self.num_done
        is_over = self.is_over()
        missing = self.missing()
        if not self.engine.workers.takes_turn(is_over=is_over):
            return False
        for split, step in missing:
            if step == head:
                self.evaluate(split, at=step)
        if self.engine.global_steps == head and self.is_snapshot_due():
            self.save()
            if self._writes:
                self._prune_snapshots(least=1)  # a run resumes from the newest
        for split, step in missing:
            if step != head and is_over:
                self.evaluate(split, at=step)
        return True

    # Requests of the user.

    def look_for_requests(self) -> None:
        """Turn a STOP file, or the end of the launcher, into a vote of this rank."""
        self.has_stop_file = self._writes and bool(self.directory.stop_files())
        if self.has_stop_file or any_ended(self._launchers):
            self.engine.request_stop()

    def _is_asked_to_stop(self) -> bool:
        self.look_for_requests()
        return self.engine.stop_requested

    def stop_if_requested(self) -> None:
        """Raise Stopped if any rank was asked to stop. A collective, for use between steps."""
        self.look_for_requests()
        if self.engine.agree_on_stop():
            raise Stopped

    # Evaluations.

    @property
    def tensor_parallel(self) -> int:
        """Number of ranks that run the same batches of an evaluation."""
        return self.engine.tensor_parallel

    @property
    def module(self) -> Any:
        """The model, of transformers."""
        return self.engine.module

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the engine's outputs for a micro-batch of an evaluation. A collective.

        Raises:
            Stopped: all ranks agreed to stop.
        """
        self.stop_if_requested()
        return self.engine.forward(micro_batch)

    def evaluate(self, split: str, *, at: int) -> None:
        """Evaluate the weights after `at` steps. A collective.

        Args:
            split: "dev" or "test".
            at: number of steps.

        Raises:
            Stopped: all ranks agreed to stop meanwhile. Nothing is recorded.
        """
        if at != self.engine.global_steps:
            self.restore(at)
        self.check()
        encoded = self.data.dev if split == "dev" else self.data.test
        result = evaluate(self, self.data.reader, encoded, self.config.train.eval_batch_size)
        refuse_unjudged(result, split)
        at_ends = self.engine.weights.ends_share()
        if split == "test":
            self._by_label[at] = result.by_label
        evaluation = evaluation_record(self.data.task.metric, split, at, result)
        # The files come first: an evaluation that is recorded is not done again.
        if self._writes:
            self._write_evaluation(evaluation, result, at_ends)
        self.record(evaluation)

    def _write_evaluation(
        self, evaluation: EvaluationRecord, result: EvaluationResult, at_ends: float | None
    ) -> None:
        """Write and show what an evaluation has found. For rank 0."""
        self._log_metrics(numbers_of(evaluation, result, at_ends))
        if evaluation.split == "test":
            rows = prediction_rows(self.data.task, self.data.test.examples, result.predicted)
            self.directory.write_predictions(evaluation.step, rows)
        logger.info("%s", evaluation_line(evaluation, self.data.task.metric))
        if result.samples:
            self.directory.log_samples(evaluation.step, evaluation.split, result.samples)
            logger.info("%s", samples_line(result))

    def evaluated(self) -> set[tuple[str, int]]:
        """Return the split and the step of each evaluation that is recorded."""
        return {(evaluation.split, evaluation.step) for evaluation in self.evaluations}

    # Files.

    def save(self) -> None:
        """Write a snapshot of the current step, unless it is there. A collective."""
        step = self.engine.global_steps
        target = snapshot_path(self.directory.snapshots, step)

        def is_there() -> bool:
            manifest = read_manifest(target)
            return manifest is not None and self._owner().owns(step, manifest)

        if distributed.on_rank_zero(is_there):
            return
        self.check()  # wrong weights would come back from a snapshot after every restart
        checksum = self._owner().checksum(step) if self._writes else None
        self.engine.write_model(target, journal=checksum)

    def _prune_snapshots(self, least: int) -> None:
        """Remove all but the newest snapshots, of which at least some stay."""
        num_kept = max(least, self.config.train.keep_snapshots)
        protected = [] if is_replayable(self.config) else [0]
        prune_snapshots(self.directory.snapshots, num_kept, protected)

    def _log_metrics(self, metrics: Numbers) -> None:
        """Append numbers of the current step to metrics.jsonl, and send them to the monitors."""
        if self._writes:
            step = self.engine.global_steps
            self.directory.log_metrics({"step": step, **metrics, "seconds": self._seconds()})
            self.monitors.log(metrics, step)

    def _seconds(self) -> float:
        """Return the seconds that all processes of this run have taken so far."""
        return round(time.monotonic() - self._began, 3)

    # Results.

    def _results(self, *, is_finished: bool) -> RunResults:
        """Return the results. The engine has the best weights if the run finished. A collective."""
        config = self.config
        metric = self.data.task.metric
        ended = self.evaluations if is_finished else []
        best = best_evaluation(ended)
        trained = best_evaluation(ended, first_step=1)
        best_step = None if best is None else best.step
        tests: dict[int | None, Mapping[str, float]] = {
            each.step: each.metrics for each in self.evaluations if each.split == "test"
        }
        of_base = tests.get(0, {})
        of_best = tests.get(best_step, {})
        steps = self._recorded_steps()
        is_early = self.num_done < self.num_steps and self.has_lost_patience()
        return results_of(
            self.engine,
            config,
            self.data.task,
            method=method_name(config),
            finished=is_finished,
            zero_shot=of_base.get(metric),
            test=of_best.get(metric),
            majority_class=of_base.get("majority_class"),
            macro_f1=of_best.get("macro_f1"),
            by_label=self._by_label.get(best_step or 0),
            best_step=best_step,
            best_dev_loss=None if best is None else best.loss,
            trained_dev_loss=None if trained is None else trained.loss,
            worse_than_base=is_worse_than_base(ended),
            steps=self.num_done,
            early_stop_step=self.num_done if is_early else None,
            seconds=self._seconds(),
            peak_memory_bytes=peak_memory_bytes(self._earlier),
            skipped_steps=sum(not step.applied for step in steps),
            flat_steps=sum(step.applied and not any(step.projected_grads) for step in steps),
        )
