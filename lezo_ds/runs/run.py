"""A run: evaluate, train, write snapshots, and score the best step.

`Run` has the order of things. Its subclasses have what differs between runs:

    ZerothOrderRun (zeroth_order.py)    LeZO and MeZO; a run that only scores has no steps
      a step        forward passes at probes, then an update of each rank's shards
      on disk       journal.jsonl has a line for each step; a snapshot only saves time
      ReplicaRun (elastic.py)           a launch that shares the run with others
    FirstOrderRun (first_order.py)      AdamW
      a step        forward and backward passes, then DeepSpeed's optimizer; the loop is that of
                    transformers' Trainer, which calls the run back
      on disk       training_state.json names the checkpoint from which a run resumes

A launch is what one command starts: one rank or many. Most runs have one launch, which does at once
what is due. With `elastic.lighthouse`, several launches do the steps of a run together, and one of
them evaluates while the others go on.

Each rank executes this. (c) marks a collective: a rank that does not get there hangs all others, so
each decision depends only on what all ranks know. Rank 0 writes the files.

    open                             (c)  the records, the weights to resume with
    cut metrics.jsonl and samples.jsonl, write config.yaml
    begin                            (c)  evaluate the base model on the test split
    cross_check                      (c)  a training pass against the model alone
    repeat
        check                        (c)  every 100 steps
        evaluate_and_save            (c)  evaluate on the dev split, save; if they are due
        leave the loop                    after the last step, or when train.patience has run out
        raise Stopped                     if the votes in the last all-reduce ask for it
        look for requests                 they become votes of this rank in the next all-reduce
        step                         (c)
        write metrics.jsonl, show progress
    finish                           (c)  replicas wait for evaluations of others
    restore                          (c)  the step with the lowest validation loss
    evaluate                         (c)  it on the test split
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
import math
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lezo_ds import distributed
from lezo_ds.checkpoints.snapshots import (
    SnapshotOwner,
    own_snapshots,
    prune_snapshots,
    read_manifest,
    remove_snapshots,
    snapshot_path,
)
from lezo_ds.config import RunConfig, eval_every
from lezo_ds.data.evaluation import evaluate, prediction_rows
from lezo_ds.data.prefetch import StepBatches
from lezo_ds.data.task_data import TaskData
from lezo_ds.engine import ModelEngine
from lezo_ds.errors import last_step
from lezo_ds.files import remove_directory
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.journal import EvaluationRecord, Header
from lezo_ds.runs import records
from lezo_ds.runs.cross_check import cross_check
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.monitors import Monitors
from lezo_ds.runs.results import RunResults
from lezo_ds.runs.screen import evaluation_line, number, progress_bar, samples_line
from lezo_ds.runs.signals import Stopped, any_ended, launchers, on_stop_signals
from lezo_ds.tasks.metrics import LabelScore

logger = logging.getLogger(__name__)

CHECK_EVERY = 100
"""Steps between checks that the weights of each rank are the result of the steps so far."""

MAJORITY_CLASS = "majority_class"
MACRO_F1 = "macro_f1"
"""Names of scores in the record of an evaluation, next to the task's metric."""

StepMetrics = dict[str, float | bool | None]
"""Numbers of a step, by the names that they have in metrics.jsonl, such as `loss` and `applied`."""


class Run(ABC):
    """What one rank does of a run.

    The head of this module has the order of the calls. `begin`, `evaluate_and_save` and `finish`
    may raise `Stopped`.

    Attributes:
        config: the configuration of the run.
        data: the encoded splits, the metric and the objective.
        batches: the batches of the steps; a thread lays out the next one.
        directory: where rank 0 writes.
        monitors: what shows the numbers of the run elsewhere; none are started yet.
        engine: the sharded model. `open` brings it to the step at which the run resumes.
        evaluations: all recorded evaluations, oldest first, the same on every rank.
        needs_snapshot_to_stop: whether a stop would lose the steps since the last snapshot.
        num_steps: number of steps to do; 0 if the run only scores.
        num_done: number of steps done. `engine.global_steps` goes back when an earlier step is
            restored, and this does not.
        eval_every: number of steps between validations.
        has_stop_file: whether rank 0 found the file STOP when it looked last.
    """

    engine: ModelEngine
    needs_snapshot_to_stop = False

    def __init__(
        self, config: RunConfig, data: TaskData, directory: RunDirectory, engine: ModelEngine
    ) -> None:
        self.config = config
        self.data = data
        self.batches = StepBatches(data, config)
        self.directory = directory
        self.engine = engine
        self.monitors = Monitors()
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
            self.num_done = self.engine.global_steps
            self._earlier = RunResults.read(self.directory.results)
            if self._earlier is not None:
                self._by_label[self._earlier.best_step or 0] = self._earlier.by_label
            if self._writes:
                self._prune_snapshots()
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
                self.directory.write_json(self.directory.results, asdict(results))
                self.monitors.finish(results)
                if is_finished and self.config.train.keep_snapshots == 0:
                    remove_directory(self.directory.checkpoints)
                    protected = self.protected_steps(is_finished=True)
                    remove_snapshots(self.directory.snapshots, protected)
                self.directory.forget_stop()
                self.close()
            return results

    def _run_to_end(self) -> bool:
        """Do everything that is left. Return whether the run finished, or was asked to stop."""
        try:
            self.begin()
            self.num_done = self.engine.global_steps
            bar = progress_bar(self.num_steps, num_done=self.num_done, is_shown=self._writes)
            with logging_redirect_tqdm(), bar:  # log lines go above the progress bar
                self.train(bar)
                self.finish()
            best = records.best_evaluation(self.evaluations)
            if best is not None:
                self.restore(best.step)
                self.evaluate("test", at=best.step)
        except Stopped:  # from the loop, or from inside an evaluation
            return False
        return True

    def cross_check(self) -> None:
        """Compare a training pass with the model alone, if steps follow. A collective."""
        if self.num_done < self.num_steps:
            cross_check(self.engine, self.data, self.config)

    def do_what_is_due(self) -> bool:
        """Do what is due between two steps, and return whether no step follows. A collective.

        Raises:
            Stopped: all ranks agreed to stop.
        """
        if self.num_done > 0 and self.is_check_due():
            self.check()
        self.evaluate_and_save()
        if self.num_done >= self.num_steps or self.has_lost_patience():
            return True
        # The votes were part of the last step's all-reduce. A snapshot that the stop needs is
        # written by now.
        if self.engine.stop_agreed:
            raise Stopped
        self.look_for_requests()
        return False

    def count_step(self, metrics: StepMetrics, bar: tqdm[Any]) -> None:
        """Log and show a step that was done."""
        self.num_done = self.engine.global_steps
        self._log_metrics(metrics)
        bar.set_postfix({"loss": number(metrics["loss"])}, refresh=False)
        bar.update()

    # What differs between runs. All but the numbers of steps are collectives of this launch.

    @abstractmethod
    def open(self) -> None:
        """Start or open the run's records, and bring the engine to the last recorded step.

        What another run has left in the directory is moved aside.
        """

    @abstractmethod
    def train(self, bar: tqdm[Any]) -> None:
        """Do what is left of the steps, with evaluations and snapshots. It may raise Stopped."""

    @abstractmethod
    def record(self, evaluation: EvaluationRecord) -> None:
        """See that an evaluation that this launch has done is recorded."""

    @abstractmethod
    def restore(self, step: int) -> None:
        """Bring the engine to the exact weights after a step that was validated."""

    @abstractmethod
    def protected_steps(self, *, is_finished: bool) -> tuple[int, ...]:
        """Return the steps whose snapshots stay, whatever train.keep_snapshots is.

        A run that `is_finished` may need fewer of them.
        """

    @abstractmethod
    def owner(self) -> SnapshotOwner:
        """Return what the snapshots of this run have in their manifests. For rank 0."""

    @abstractmethod
    def num_skipped_steps(self) -> int:
        """Return the number of steps that changed nothing. Only that of rank 0 counts."""

    def num_flat_steps(self) -> int:
        """Return the number of steps whose probes had equal losses. Only that of rank 0 counts."""
        return 0

    def check(self) -> None:  # noqa: B027
        """Check the weights, if their right values are known, and wait for records to be synced.

        Raises:
            DesyncError: the weights of a rank are not what the steps made of them.
            JournalError: the records of the last steps cannot be written.
        """

    def close(self) -> None:  # noqa: B027
        """Close the run's records. Nothing can be recorded afterwards."""

    def begin(self) -> None:
        """Score the base model, if this launch is the one to do it, and get ready for steps."""
        self.evaluate("test", at=0)

    def evaluate_and_save(self) -> None:
        """Do the evaluation and write the snapshot that are due at this step, if any."""
        step = self.engine.global_steps
        is_due = step % self.eval_every == 0 or step == self.num_steps
        if is_due and self.num_steps > 0:
            try:
                self.evaluate("dev", at=step)
            except Stopped:
                if self.needs_snapshot_to_stop:
                    self.save_if_due()
                raise
        self.save_if_due()

    def finish(self) -> None:  # noqa: B027
        """Wait, after the last step, until all evaluations of the run are recorded here."""

    # What is due.

    def is_check_due(self) -> bool:
        """Return whether the weights are to be checked at the current step."""
        return self.engine.global_steps % CHECK_EVERY == 0

    def is_snapshot_due(self) -> bool:
        """Return whether a snapshot of the current step is due."""
        step = self.engine.global_steps
        if step == 0:
            return False
        if step == self.num_steps or self.has_lost_patience():
            return True
        if self.engine.stop_agreed and self.needs_snapshot_to_stop:
            return True
        every = self.config.train.snapshot_every
        if every is None:
            every = self.eval_every
        return every > 0 and step % every == 0

    def has_lost_patience(self) -> bool:
        """Return whether train.patience ends the run: too many validations without progress."""
        stop = records.stopping_step(self.evaluations, self.config.train.patience)
        return stop is not None and stop <= self.num_done

    # Requests of the user.

    def look_for_requests(self) -> None:
        """Turn a STOP file, or the end of the launcher, into a vote of this rank."""
        self.has_stop_file = self._writes and bool(self.directory.stop_files())
        if self.has_stop_file or any_ended(self._launchers):
            self.engine.request_stop()

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
        """Return what the engine makes of a micro-batch of an evaluation. A collective.

        Raises:
            Stopped: all ranks agreed to stop.
        """
        self.stop_if_requested()
        return self.engine.forward(micro_batch)

    def evaluate(self, split: str, *, at: int) -> None:
        """Evaluate the weights, unless they are not those after `at` steps, or that is done.

        A collective.

        Args:
            split: "dev" or "test".
            at: number of steps.

        Raises:
            Stopped: all ranks agreed to stop meanwhile. Nothing is recorded.
        """
        if self.engine.global_steps != at or (split, at) in self.evaluated():
            return
        self.check()
        encoded = self.data.dev if split == "dev" else self.data.test
        result = evaluate(self, self.data.reader, encoded, self.config.train.eval_batch_size)
        if split == "test":
            self._by_label[at] = result.by_label
        # The files come first: an evaluation that is recorded is not done again.
        if self._writes and split == "test":
            rows = prediction_rows(self.data.task, encoded.examples, result.predicted)
            self.directory.write_predictions(at, rows)
        metric = self.data.task.metric
        scores = {
            metric: result.score,
            MAJORITY_CLASS: result.majority_class,
            MACRO_F1: result.macro_f1,
        }
        metrics = {name: score for name, score in scores.items() if score is not None}
        rewards = {f"rewards/{name}": mean for name, mean in result.rewards.items()}
        loss = result.loss if math.isfinite(result.loss) else None
        evaluation = EvaluationRecord(step=at, split=split, loss=loss, metrics=metrics | rewards)
        logged: StepMetrics = {"loss": loss, metric: result.score, **rewards}
        if result.share_ended is not None:
            logged["share_ended"] = result.share_ended
        self._log_metrics({f"{split}_{name}": value for name, value in logged.items()})
        if self._writes and result.samples:
            self.directory.log_samples(at, split, result.samples)
        self.record(evaluation)
        if self._writes:
            logger.info("%s", evaluation_line(evaluation, metric))
            if result.samples:
                logger.info("%s", samples_line(result))

    def evaluated(self) -> set[tuple[str, int]]:
        """Return the split and the step of each evaluation that is recorded."""
        return {(evaluation.split, evaluation.step) for evaluation in self.evaluations}

    # Files.

    def starts_from_snapshot(self) -> bool:
        """Return whether the weights before the first step are restored from a snapshot."""
        # A prefix starts from activations of the base model. Another machine rounds these
        # differently, so a replay there needs their exact bits.
        return self.config.peft.kind == "prefix"

    def save(self) -> None:
        """Write a snapshot of the current step, and what a run resumes from, unless it is there."""
        step = self.engine.global_steps
        target = snapshot_path(self.directory.snapshots, step)

        def is_there() -> bool:
            manifest = read_manifest(target)
            return manifest is not None and self.owner().owns(step, manifest)

        if distributed.on_rank_zero(is_there):
            return
        self.check()  # wrong weights would come back from a snapshot after every restart
        checksum = self.owner().checksum(step) if self._writes else None
        self.engine.write_model(target, journal=checksum)

    def save_if_due(self) -> None:
        """Write the snapshot that is due at this step, if any; remove the oldest. A collective."""
        if not self.is_snapshot_due():
            return
        self.save()
        if self._writes:
            self._prune_snapshots()

    def _prune_snapshots(self) -> None:
        """Remove all but the newest snapshots while the run goes on."""
        num_kept = max(1, self.config.train.keep_snapshots)  # a run resumes from the newest
        protected = self.protected_steps(is_finished=False)
        prune_snapshots(self.directory.snapshots, num_kept, protected)

    def prepare_start(self) -> Header:
        """Return the header of a new run. Move what another one has left aside. For rank 0."""
        self.directory.set_aside(self.directory.outputs())
        base = self.engine.base
        return records.make_header(self.config, self.data, base.fingerprint, base.table_hash)

    def prepare_resumption(self, header: Header, num_steps: int) -> None:
        """Announce the resumption of the run with a header after `num_steps` steps. For rank 0.

        Snapshots of other runs or of unrecorded steps are moved aside. UserError: it has other base
        weights.
        """
        records.assert_same_base(header, self.engine.base)
        if num_steps > 0:  # loading or replaying them may take a while
            logger.info("resuming at step %d of %d", num_steps, self.config.train.steps)
        root = self.directory.snapshots
        _, foreign_steps = own_snapshots(root, self.owner())
        self.directory.set_aside([snapshot_path(root, step) for step in foreign_steps])

    def _log_metrics(self, metrics: StepMetrics) -> None:
        """Append numbers of the current step to metrics.jsonl, and send them to the monitors."""
        if not self._writes:
            return
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
        # A run that only scores has no validations, so nothing is best.
        best = trained = None
        if is_finished:
            best = records.best_evaluation(self.evaluations)
            trained = records.best_evaluation(self.evaluations, first_step=1)
        best_step = None if best is None else best.step
        tests = [evaluation for evaluation in self.evaluations if evaluation.split == "test"]
        scores: dict[int | None, dict[str, float]] = {test.step: test.metrics for test in tests}
        of_base = scores.get(0, {})
        of_result = scores.get(best_step, {})
        early_stop_step = None
        if self.num_done < self.num_steps and self.has_lost_patience():
            early_stop_step = self.num_done
        return RunResults(
            task=self.data.task.name,
            method="mezo" if config.zo.sparsity == 0 else "lezo",
            peft=config.peft.kind,
            metric=metric,
            protocol=config.data.protocol,
            finished=is_finished,
            zero_shot=of_base.get(metric),
            test=of_result.get(metric),
            majority_class=of_base.get(MAJORITY_CLASS),
            macro_f1=of_result.get(MACRO_F1),
            by_label=self._by_label.get(best_step or 0),
            best_step=best_step,
            best_dev_loss=None if best is None else best.loss,
            trained_dev_loss=None if trained is None else trained.loss,
            worse_than_base=is_finished and records.is_worse_than_base(self.evaluations),
            steps=self.num_done,
            early_stop_step=early_stop_step,
            seed=config.seed,
            seconds=self._seconds(),
            peak_memory_bytes=self._peak_memory_bytes(),
            skipped_steps=self.num_skipped_steps(),
            flat_steps=self.num_flat_steps(),
            model_fingerprint=self.engine.base.fingerprint,
            weights_digest=self.engine.weights.digest(),
            world_size=self.engine.world_size,
        )

    def _peak_memory_bytes(self) -> int:
        """Return the most memory that a rank has used in any process of the run. A collective."""
        if self.engine.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.engine.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
        # A process that only resumes a finished run uses less than the one that trained it.
        if self._earlier is not None:
            peak = max(peak, self._earlier.peak_memory_bytes)
        peaks: list[int] = distributed.gather_objects(peak)
        return max(peaks)
