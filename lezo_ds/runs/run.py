"""A run of any method: score, train, validate, take snapshots, and score the best step."""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Mapping
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
from lezo_ds.config import TRAINED, RunConfig, config_to_dict, eval_every
from lezo_ds.data.evaluation import evaluate, prediction_rows
from lezo_ds.data.task_data import TaskData
from lezo_ds.engine import LezoEngine, ModelEngine
from lezo_ds.files import remove_directory
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.journal import EvaluationRecord, Journal
from lezo_ds.runs import records
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.results import RunResults
from lezo_ds.runs.screen import evaluation_line, number, progress_bar
from lezo_ds.runs.signals import any_ended, launchers, on_stop_signals
from lezo_ds.zo.records import StepRecord

logger = logging.getLogger(__name__)

CHECK_EVERY = 100
"""Steps between checks that the weights of each rank are the result of the steps so far."""


class Run:
    """The part of a run that one process does: of LeZO or MeZO, or one that only scores. Rank 0 writes files.

    A decision depends only on what all ranks know: a rank that decided otherwise would hang in a collective.
    """

    engine: LezoEngine  # at any step; `_open` brings it to the step at which the run resumes
    _has_journal = True  # whose replay gives weights back without a snapshot

    def __init__(
        self, config: RunConfig, data: TaskData, directory: RunDirectory, engine: ModelEngine
    ) -> None:
        self.config = config
        self.data = data
        self.directory = directory
        self.engine = engine  # type: ignore[assignment]
        self.writes = engine.global_rank == 0
        self.evaluations: list[EvaluationRecord] = []
        self.num_steps = (config.train.steps or 0) if config.method in TRAINED else 0
        self._journal: Journal | None = None  # on rank 0
        self._launchers = launchers()
        self._eval_every = eval_every(config)
        self._num_done = 0
        self._seconds_before = 0.0
        self._started = time.monotonic()

    def _protected(self) -> tuple[int, ...]:
        """Return the steps whose snapshots are kept while the run goes on."""
        # A prefix starts from activations, which another machine rounds differently.
        return (0,) if self.num_steps > 0 and self.config.peft.kind == "prefix" else ()

    def _check(self) -> None:
        """Check the weights, and wait until the records that made them are on the disk. A collective."""
        if (
            self._has_journal
        ):  # else nothing is known of the weights but what the optimizer made of them
            self.engine.check_weights()
            self.engine.finish_records()

    def execute(self) -> RunResults:
        """Run to the end, or until all ranks agree to stop, and return the results."""
        with distributed.lost_ranks_reported(self._last_good_step):
            self._open()
            self._num_done = self.engine.global_steps
            if self.writes:
                self._prune_snapshots()
                self._seconds_before = self.directory.cut_metrics(self._num_done)
                facts = config_to_dict(self.config)
                self.directory.write_facts(facts, self.engine.world_size, self.engine.device)
            self._started = time.monotonic()
            # A handler only sets a flag, a vote in the next all-reduce: all ranks stop at the same step.
            with on_stop_signals(lambda _: self.engine.request_stop()):
                finished, best = self._run_to_end()
            results = self._results(best, finished)
            self._check()
            if self.writes:
                results.write(self.directory.results)
                if finished and self.config.train.keep_snapshots == 0:
                    remove_directory(self.directory.checkpoints)
                    remove_snapshots(
                        self.directory.snapshots, self._protected() if self._has_journal else ()
                    )
                self.directory.stop_file.unlink(missing_ok=True)
                if self._journal is not None:
                    self._journal.close()
            return results

    def _last_good_step(self) -> str:
        return f"last good step: {self._num_done - 1 if self._num_done else 'none'}"

    def _resume(self, step: int, owner: SnapshotOwner) -> None:
        """Announce it, and move the snapshots of other runs, and those after the end of the run's records."""
        if step > 0:  # replaying it may take a while
            logger.info("resuming at step %d of %d", step, self.num_steps)
        _, foreign = own_snapshots(self.directory.snapshots, owner)
        reason = "of another run, or of steps that are no longer recorded:"
        self.directory.set_aside(
            [snapshot_path(self.directory.snapshots, step) for step in foreign], reason
        )

    def _run_to_end(self) -> tuple[bool, EvaluationRecord | None]:
        """Do everything that is left; return whether the run finished, and the best step if it did."""
        try:
            self._evaluate("test", at=0)
            bar = progress_bar(self.num_steps, self._num_done, is_shown=self.writes)
            with logging_redirect_tqdm(), bar:  # log lines go above the progress bar
                self._train(bar)
            best = records.best_evaluation(self.evaluations)
            if best is not None:
                self._restore(best.step)
                self._evaluate("test", at=best.step)
        except Stopped:
            return False, None
        return True, best

    def _train(self, bar: tqdm[Any]) -> None:
        while True:
            if self._num_done > 0 and self._num_done % CHECK_EVERY == 0:
                self._check()
            self._evaluate_if_due()
            self._snapshot_if_due()
            if self._num_done >= self.num_steps or self._has_lost_patience():
                return
            if self.engine.stop_agreed:
                raise Stopped
            self._look_for_requests()
            values = self._train_step()
            self._num_done = self.engine.global_steps
            self._log(values)
            metric, last = self.data.task.metric, self.evaluations[-1:]
            scores = {f"{record.split} {metric}": number(record.metrics[metric]) for record in last}
            bar.set_postfix({"loss": number(values["loss"]), **scores}, refresh=False)
            bar.update()

    def _has_lost_patience(self) -> bool:
        stop = records.stopping_step(self.evaluations, self.config.train.patience)
        return stop is not None and stop <= self._num_done

    def _look_for_requests(self) -> None:
        """Turn a STOP or SAVE file, or the end of the launcher, into a request on which all ranks vote."""
        if any_ended(self._launchers) or (self.writes and self.directory.stop_file.exists()):
            self.engine.request_stop()
        if self.writes and self.directory.save_file.exists():
            self.engine.request_snapshot()

    def _log(self, values: Mapping[str, Any]) -> None:
        if not self.writes:
            return
        step = self.engine.global_steps
        self.directory.log_metrics({"step": step, **values, "seconds": round(self._seconds(), 3)})
        if self.engine.monitor.enabled:
            numbers = {name: float(value) for name, value in values.items() if value is not None}
            self.engine.monitor.write_events(
                [(f"train/{name}", n, step) for name, n in numbers.items()]
            )

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _evaluate_if_due(self) -> None:
        step = self.engine.global_steps
        if self.num_steps == 0 or (step % self._eval_every and step != self.num_steps):
            return
        try:
            self._evaluate("dev", at=step)
        except Stopped:
            if not self._has_journal:
                self._snapshot_if_due()
            raise

    def _evaluate(self, split: str, at: int) -> None:
        """Evaluate the current weights if they have seen `at` steps and have no such evaluation yet."""
        if self.engine.global_steps != at or self._evaluation(split, at):
            return
        self._check()
        examples = self.data.dev if split == "dev" else self.data.test
        if self.writes and split == "test":  # this may take as long as many steps
            logger.info("scoring %d test examples", len(examples.examples))
        result = evaluate(self, self.data, examples, batch_size=self.config.train.eval_batch_size)
        if self.writes and split == "test":
            self.directory.write_predictions(
                at, prediction_rows(examples.examples, result.predicted)
            )
        metric = self.data.task.metric
        metrics = {metric: result.score}
        if result.majority_class is not None:
            metrics["majority_class"] = result.majority_class
        loss = result.loss if math.isfinite(result.loss) else None
        record = EvaluationRecord(step=at, split=split, loss=loss, metrics=metrics)
        self._record_evaluation(record)
        self._log({f"{split}_loss": loss, f"{split}_{metric}": result.score})
        if self.writes:
            logger.info("%s", evaluation_line(record, metric))

    @property
    def tensor_parallel(self) -> int:
        return self.engine.tensor_parallel

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the outputs in an evaluation, or leave it, to be repeated, if any rank was asked to stop."""
        self._look_for_requests()
        if self.engine.agree_on_stop():
            raise Stopped
        return self.engine.forward(micro_batch)

    def _evaluation(self, split: str, step: int) -> EvaluationRecord | None:
        return next((e for e in self.evaluations if e.split == split and e.step == step), None)

    def _is_snapshot_due(self) -> bool:
        step, every = self.engine.global_steps, self.config.train.snapshot_every
        every = self._eval_every if every is None else every
        asked = self.engine.snapshot_agreed or (self.engine.stop_agreed and not self._has_journal)
        is_last = step == self.num_steps or self._has_lost_patience()
        return step > 0 and (is_last or asked or (every > 0 and step % every == 0))

    def _snapshot_if_due(self) -> None:
        if not self._is_snapshot_due():
            return
        self._save()
        if self.writes:
            self._prune_snapshots()
        if self.writes and self.engine.snapshot_agreed:
            self.directory.save_file.unlink(missing_ok=True)

    def _prune_snapshots(self) -> None:
        keep = max(
            1, self.config.train.keep_snapshots
        )  # a run that goes on resumes from the newest
        prune_snapshots(self.directory.snapshots, keep, self._protected())

    def _results(self, best: EvaluationRecord | None, finished: bool) -> RunResults:
        config, metric = self.config, self.data.task.metric
        before = self._evaluation("test", 0)
        final = self._evaluation("test", best.step) if best else None
        trained = records.best_evaluation(self.evaluations, first_step=1)
        scored = final if config.method in TRAINED else before
        any_test = before or final
        is_zero_shot = config.method in {*TRAINED, "zero_shot"}
        stopped_early = self._num_done < self.num_steps and self._has_lost_patience()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
        if self.engine.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.engine.device)
        # A process that resumes a finished run uses less than the one that trained it.
        earlier = RunResults.read(self.directory.results)
        if earlier is not None:
            peak = max(peak, earlier.peak_memory_bytes)
        return RunResults(
            task=self.data.task.name,
            method=config.method,
            peft=config.peft.kind,
            metric=metric,
            protocol=config.data.protocol,
            finished=finished,
            zero_shot=before.metrics[metric] if before and is_zero_shot else None,
            test=scored.metrics.get(metric) if scored else None,
            majority_class=any_test.metrics.get("majority_class") if any_test else None,
            best_step=best.step if best else None,
            best_dev_loss=best.loss if best else None,
            trained_dev_loss=trained.loss if best and trained else None,
            worse_than_base=finished and records.is_worse_than_base(self.evaluations),
            steps=self._num_done,
            early_stop_step=self._num_done if stopped_early else None,
            seed=config.seed,
            seconds=round(self._seconds(), 3),
            peak_memory_bytes=max(distributed.gather_objects(peak)),
            skipped_steps=self._num_skipped(),
            model_fingerprint=self.engine.base.fingerprint,
            weights_digest=self.engine.weights.digest(),
            world_size=self.engine.world_size,
        )

    # What AdamW does otherwise (see FirstOrderRun).

    def _open(self) -> None:
        self.evaluations = distributed.on_rank_zero(self._open_journal)
        self._restore(None)
        self.engine.attach_journal(self._journal)
        self.engine.watch_weights()
        if self._protected() and self.engine.global_steps == 0:
            self._save()

    def _open_journal(self) -> list[EvaluationRecord]:
        path, base = self.directory.journal, self.engine.base
        if not path.exists():
            self.directory.set_aside(self.directory.outputs(), "an earlier run left")
            header = records.make_header(self.config, self.data, base.fingerprint, base.table_hash)
            self._journal = Journal.create(path, header)
            return []
        self._journal = Journal.open(path)
        records.assert_same_base(self._journal.header, base)
        self._resume(len(self._steps()), self._owner())
        return records.evaluations_of(self._journal.records)

    def _steps(self) -> list[StepRecord]:
        """Return all steps on rank 0, and none elsewhere."""
        return [] if self._journal is None else records.steps_of(self._journal.records)

    def _num_skipped(self) -> int:
        return sum(not record.applied for record in self._steps())

    def _owner(self) -> SnapshotOwner:
        assert self._journal is not None, "only rank 0 has the journal"
        return records.owner_of(self._journal.header, self._journal.step_checksums)

    def _train_step(self) -> dict[str, Any]:
        batch = self.data.step_batch(self.config, self.engine.global_steps)
        return self._values(self.engine.train_batch(batch, self.data.loss))

    def _values(self, record: StepRecord) -> dict[str, Any]:
        gradients = record.projected_grads
        gradient = sum(gradients) / len(gradients) if gradients else None
        if not record.applied and self.writes:
            text = "step %d skipped: loss %s, projected gradient %s"
            logger.warning(text, record.step, number(record.loss), number(gradient))
        return {"loss": record.loss, "projected_gradient": gradient, "applied": record.applied}

    def _record_evaluation(self, record: EvaluationRecord) -> None:
        self.evaluations.append(record)
        if self._journal is not None:
            self._journal.append(record)

    def _save(self) -> None:
        step = self.engine.global_steps

        def is_saved() -> bool:
            manifest = read_manifest(snapshot_path(self.directory.snapshots, step))
            return manifest is not None and self._owner().owns(step, manifest)

        if not distributed.on_rank_zero(is_saved):
            self._check()
            checksum = self._owner().checksum(step) if self.writes else None
            self.engine.save_checkpoint(self.directory.snapshots, step, checksum)

    def _restore(self, step: int | None) -> None:
        owner = self._owner() if self.writes else None
        self.engine.load_checkpoint(self.directory.snapshots, self._steps(), step, owner)


class Stopped(Exception):  # noqa: N818  # this is not an error
    """All ranks have agreed to stop."""
