"""A run of any method: score, train, validate, take snapshots, pick the best step and score it."""

from __future__ import annotations

import logging
import resource
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lezo_ds import distributed
from lezo_ds.config import TRAINED, RunConfig, config_to_dict
from lezo_ds.data.evaluation import EvaluationResult, Model, evaluate
from lezo_ds.data.task_data import EncodedSplit, TaskData
from lezo_ds.journal import EvaluationRecord
from lezo_ds.model.batch import MicroBatch
from lezo_ds.model.snapshots import prune_snapshots, read_manifest, snapshot_path
from lezo_ds.runs.launcher import LauncherWatch
from lezo_ds.runs.run_directory import RunDirectory, library_versions

logger = logging.getLogger(__name__)


class Engine(Model, Protocol):
    """What a run needs of an engine, zeroth- or first-order."""

    global_steps: int
    stop_agreed: bool
    snapshot_agreed: bool

    @property
    def monitor(self) -> Any:  # noqa: ANN401
        """DeepSpeed's monitor."""
        ...

    def request_stop(self) -> None:
        """Ask all ranks to stop after the next step."""
        ...

    def request_snapshot(self) -> None:
        """Ask all ranks for a snapshot after the next step."""
        ...

    def agree_on_stop(self) -> bool:
        """Return whether a rank has asked for a stop. A collective."""
        ...


def num_steps(config: RunConfig, num_train: int) -> int:
    """Return how many steps a run has: 0 for methods that do not train."""
    if config.method not in TRAINED:
        return 0
    if config.train.steps is not None:
        return config.train.steps
    return max(1, config.adamw.epochs * num_train // config.train.batch_size)


class Run(ABC):
    """One process's part of a run. Files are rank 0's; every decision follows from what all ranks know.

    Args:
        config: of the run.
        data: what it trains on and is scored on.
        directory: of the run.
        engine: at any step; `_open` brings it to where the run stands.

    Attributes:
        saves_when_stopped: whether a run that is stopped would lose the steps since its last snapshot.
    """

    saves_when_stopped: ClassVar[bool] = False

    def __init__(self, config: RunConfig, data: TaskData, directory: RunDirectory, engine: Engine) -> None:
        self.config = config
        self.data = data
        self.directory = directory
        self.engine = engine
        self.writes = engine.global_rank == 0
        self._launcher = LauncherWatch()
        self.evaluations: list[EvaluationRecord] = []
        self.num_steps = num_steps(config, len(data.train.encoded))
        self._eval_every = config.train.eval_every or max(1, self.num_steps // 10)
        self._num_done = 0
        self._seconds_before = 0.0
        self._started = time.monotonic()

    @abstractmethod
    def _open(self) -> None:
        """Bring the engine and `evaluations` to where the run stands."""

    @abstractmethod
    def _train_step(self) -> dict[str, Any]:
        """Do one step; return what metrics.jsonl says of it, the loss first."""

    @abstractmethod
    def _record_evaluation(self, record: EvaluationRecord) -> None:
        """Keep an evaluation where `_open` finds it."""

    @abstractmethod
    def _save(self) -> None:
        """Write a snapshot of the present step. A collective."""

    def _is_saved(self, step: int) -> bool:
        """Return, on rank 0, whether `_save` has been done at this step."""
        return read_manifest(snapshot_path(self.directory.snapshots, step)) is not None

    @abstractmethod
    def _restore(self, step: int) -> None:
        """Bring the weights back to those after `step` updates. A collective."""

    @abstractmethod
    def _details(self) -> dict[str, Any]:
        """Return what results.json says of this kind of run only. A collective."""

    def _close(self) -> None:
        """Close what `_open` opened."""
        return

    def _check(self) -> None:
        """Check that the weights are those of the run. A collective."""
        return

    def execute(self) -> dict[str, Any]:
        """Run to the end, or until a stop is agreed on; return what results.json holds.

        Raises:
            LostRankError: another rank has ended or hangs; the message names the last good step.
            LezoError: see its kinds.
        """
        with distributed.lost_ranks_reported(self._where):
            self._begin()
            with _StopOnSignals(self.engine):
                finished, best = self._run_to_end()
            results = self._results(best, finished)
            if self.writes:
                self.directory.write_results(results)
                self.directory.stop_file.unlink(missing_ok=True)
                self._close()
            return results

    def _where(self) -> str:
        return f"last good step: {self._num_done - 1 if self._num_done else 'none'}"

    def _run_to_end(self) -> tuple[bool, EvaluationRecord | None]:
        """Do all that is left to do; return whether no stop was agreed on meanwhile, and the best step."""
        try:
            self._evaluate("test", at=0)
            self._train()
            best = self._best()
            if best is not None:
                self._restore(best.step)
                self._evaluate("test", at=best.step)
        except _Stopped:
            return False, None
        return True, best

    def _train(self) -> None:
        """Do all steps that are left, and what is due between them."""
        with logging_redirect_tqdm(), self._progress() as bar:  # a line of the log goes above the bar
            while True:
                self._check_if_due()
                self._evaluate_if_due()
                self._snapshot_if_due()
                if self._num_done >= self.num_steps:
                    return
                if self.engine.stop_agreed:
                    raise _Stopped
                self._step(bar)

    def _look_around(self) -> None:
        """See whether the user asks for something, by a file or the launcher's end; all ranks agree on it."""
        if self._launcher.is_gone():
            self.engine.request_stop()
        if self.writes and self.directory.stop_file.exists():
            self.engine.request_stop()
        if self.writes and self.directory.save_file.exists():
            self.engine.request_snapshot()

    def _begin(self) -> None:
        self._open()
        self._num_done = self.engine.global_steps
        if self.writes:
            prune_snapshots(self.directory.snapshots, self.config.train.keep_snapshots, self._protected())
            self._seconds_before = self.directory.cut_metrics(self.engine.global_steps)
            facts = config_to_dict(self.config)
            self.directory.write_facts(facts, self.engine.world_size, str(self.engine.device))
        self._started = time.monotonic()

    def _step(self, bar: Any) -> None:  # noqa: ANN401
        self._look_around()
        values = self._train_step()
        self._num_done = self.engine.global_steps
        self._log(values)
        bar.set_postfix(values, refresh=False)
        bar.update()

    def _log(self, values: Mapping[str, Any]) -> None:
        if not self.writes:
            return
        step = self.engine.global_steps
        self.directory.log_metrics({"step": step, **values, "seconds": round(self._seconds(), 3)})
        monitor = self.engine.monitor
        if monitor.enabled:
            events = [(f"train/{name}", float(v), step) for name, v in values.items() if v is not None]
            monitor.write_events(events)

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _found(self, split: str, step: int) -> EvaluationRecord | None:
        return next((e for e in self.evaluations if e.split == split and e.step == step), None)

    def _check_if_due(self) -> None:
        if self._num_done > 0 and self._num_done % self.config.train.check_every == 0:
            self._check()

    def _evaluate_if_due(self) -> None:
        step = self.engine.global_steps
        if step == 0 or (step % self._eval_every and step != self.num_steps):
            return
        try:
            self._evaluate("dev", at=step)
        except _Stopped:
            if self.saves_when_stopped:
                self._snapshot_if_due()
            raise

    def _evaluate(self, split: str, at: int) -> None:
        """Evaluate the present weights, which have seen `at` steps, unless that was done before."""
        if self.engine.global_steps != at or self._found(split, at):
            return
        self._check()
        result = self._score(self.data.dev if split == "dev" else self.data.test)
        record = evaluation_record(self.data, split, at, result)
        self._record_evaluation(record)
        self.evaluations.append(record)
        metric = self.data.task.metric
        self._log({f"{split}_loss": record.loss, f"{split}_{metric}": result.score})
        if self.writes:
            logger.info("step %d: %s loss %s, %s %.4f", at, split, record.loss, metric, result.score)

    def _score(self, split: EncodedSplit) -> EvaluationResult:
        model = _Stoppable(self.engine, self._look_around)
        return evaluate(model, self.data, split, self.config.train.eval_batch_size)

    def _snapshot_if_due(self) -> None:
        step, train = self.engine.global_steps, self.config.train
        every = self._eval_every if train.snapshot_every is None else train.snapshot_every
        asked = self.engine.snapshot_agreed or (self.saves_when_stopped and self.engine.stop_agreed)
        due = step == self.num_steps or (every > 0 and step % every == 0) or asked
        if step == 0 or not due:
            return
        if not distributed.on_rank_zero(lambda: self._is_saved(step)):
            self._check()
            self._save()
            if self.writes:
                prune_snapshots(self.directory.snapshots, train.keep_snapshots, self._protected())
        if self.writes and self.engine.snapshot_agreed:
            self.directory.save_file.unlink(missing_ok=True)

    def _protected(self) -> tuple[int, ...]:
        """Return the steps whose snapshots must stay."""
        return ()

    def _best(self) -> EvaluationRecord | None:
        return best_evaluation(self.evaluations)

    def _results(self, best: EvaluationRecord | None, finished: bool) -> dict[str, Any]:
        before = self._found("test", 0)
        final = self._found("test", best.step) if best else None
        trained = self.config.method in TRAINED
        metric = self.data.task.metric
        return {
            "task": self.data.task.name,
            "method": self.config.method,
            "peft": self.config.peft.kind,
            "metric": metric,
            "protocol": self.config.data.protocol,
            "finished": finished,
            "zero_shot": before.metrics[metric] if before and self.config.method != "icl" else None,
            "test": _metric(final if trained else before, metric),
            "majority_class": _metric(before, "majority_class"),
            "best_step": best.step if best else None,
            "best_dev_loss": best.loss if best else None,
            "steps": self._num_done,
            "seed": self.config.seed,
            "seconds": round(self._seconds(), 3),
            "peak_memory_bytes": peak_memory_bytes(self.engine),
            **self._details(),
            "world_size": self.engine.world_size,
            "versions": library_versions(),
        }

    def _progress(self) -> Any:  # noqa: ANN401
        shown = self.writes and sys.stderr.isatty()
        done = self.engine.global_steps
        return tqdm(total=self.num_steps, initial=done, disable=not shown, desc="training", smoothing=0.05)


def evaluation_record(data: TaskData, split: str, step: int, result: EvaluationResult) -> EvaluationRecord:
    """Return what a run keeps of an evaluation."""
    metrics: dict[str, float] = {data.task.metric: result.score}
    if result.majority_class is not None:
        metrics["majority_class"] = result.majority_class
    loss = result.loss if result.loss == result.loss and abs(result.loss) != float("inf") else None
    return EvaluationRecord(step=step, split=split, loss=loss, metrics=metrics)


def best_evaluation(evaluations: Sequence[EvaluationRecord]) -> EvaluationRecord | None:
    """Return the one with the lowest validation loss, the first of equals (as the papers pick)."""
    losses = [record for record in evaluations if record.split == "dev"]
    return min(losses, key=lambda record: float("inf") if record.loss is None else record.loss, default=None)


def peak_memory_bytes(engine: Engine) -> int:
    """Return the most memory that a rank has used: of its GPU, else of its process. A collective."""
    peaks = torch.zeros(engine.world_size, dtype=torch.float64, device=engine.device)
    if engine.device.type == "cuda":
        peaks[engine.global_rank] = torch.cuda.max_memory_allocated(engine.device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peaks[engine.global_rank] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(max(distributed.sum_vector(peaks)))


def _metric(record: EvaluationRecord | None, name: str) -> float | None:
    return record.metrics.get(name) if record else None


class _Stopped(Exception):  # noqa: N818  # nothing is wrong
    """All ranks have agreed to stop."""


class _Stoppable:
    """An engine to be scored, which asks all ranks before each forward pass whether to stop.

    An evaluation may take longer than whoever asks for a stop will wait; it is done again by the next run.

    Args:
        engine: that computes.
        look: called before each vote.
    """

    def __init__(self, engine: Engine, look: Callable[[], None]) -> None:
        self._engine = engine
        self._look = look
        self.global_rank = engine.global_rank
        self.world_size = engine.world_size
        self.device = engine.device

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return what a micro-batch wants, or leave the evaluation. A collective."""
        self._look()
        if self._engine.agree_on_stop():
            raise _Stopped
        return self._engine.forward(micro_batch)


class _StopOnSignals:
    """While open, SIGTERM, SIGINT and SIGUSR1 ask all ranks to stop after the next step or forward pass."""

    _SIGNALS: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, lambda *_: self._engine.request_stop())

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
