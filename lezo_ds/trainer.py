"""The training run: data, engine, journal, evaluations, snapshots, results; resumed by the same call."""

from __future__ import annotations

import hashlib
import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lezo_ds import distributed
from lezo_ds.batch import MicroBatch
from lezo_ds.checkpoint_files import load_config, resolve_model
from lezo_ds.config import RESUME_MAY_DIFFER, RunConfig, check_world, config_to_dict, load_ds_config
from lezo_ds.data import load_records, sample_splits
from lezo_ds.encoding import EncodedExample, PromptTokenizer, encode_examples, load_tokenizer
from lezo_ds.engine import LezoEngine, initialize
from lezo_ds.errors import UserError
from lezo_ds.evaluation import EvaluationResult, evaluate
from lezo_ds.journal import EvaluationRecord, Header, Journal, StepRecord, assert_compatible
from lezo_ds.noise import NOISE_VERSION
from lezo_ds.objectives import training_objective
from lezo_ds.run_directory import RunDirectory, library_versions
from lezo_ds.sampling import batch_indices
from lezo_ds.snapshots import prune_snapshots, read_manifest, snapshot_path
from lezo_ds.step_plan import PLAN_BYTES
from lezo_ds.tasks import get_task
from lezo_ds.tasks.base import Example, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodedSplit:
    """Examples of one split and their tokens, in the same order."""

    examples: tuple[Example, ...]
    encoded: tuple[EncodedExample, ...]


@dataclass(frozen=True)
class TaskData:
    """All that a run reads: a task's splits as tokens."""

    task: Task
    tokenizer: PromptTokenizer
    train: EncodedSplit
    dev: EncodedSplit
    test: EncodedSplit

    def batch(self, config: RunConfig, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step: a pure function of (seed, step)."""
        rows = batch_indices(config.seed, step, len(self.train.encoded), config.train.batch_size)
        size = config.train.micro_batch_size
        build = training_objective(self.task.kind).build_batch
        return [
            build([self.train.encoded[row] for row in rows[begin : begin + size]], self.tokenizer.pad_id)
            for begin in range(0, len(rows), size)
        ]


def load_task_data(config: RunConfig) -> TaskData:
    """Load, sample and tokenise a run's task.

    Raises:
        UserError: data or tokenizer are missing or do not fit the task.
    """
    task = get_task(config.data.task)
    path = None if config.data.path is None else Path(config.data.path)
    train, validation = load_records(task, path)
    data = config.data
    sizes = (data.num_train, data.num_dev, data.num_test)
    splits = sample_splits(task, train, validation, data.protocol, data.seed, *sizes)
    directory = resolve_model(config.model.path)
    tokenizer = load_tokenizer(str(directory))

    def encode(examples: tuple[Example, ...]) -> EncodedSplit:
        return EncodedSplit(examples, tuple(encode_examples(tokenizer, examples, data.max_length)))

    task_data = TaskData(task, tokenizer, encode(splits.train), encode(splits.dev), encode(splits.test))
    _check_positions(task_data, directory)
    return task_data


def _check_positions(data: TaskData, directory: Path) -> None:
    num_positions = getattr(load_config(directory).get_text_config(), "max_position_embeddings", None)
    encoded = [example for split in (data.train, data.dev, data.test) for example in split.encoded]
    longest = max(len(sequence) for example in encoded for sequence in example.sequences)
    if num_positions is not None and longest > num_positions:
        raise UserError(
            "an input is longer than the model's positions",
            got=f"{longest} tokens",
            expected=f"at most {num_positions}",
            fix=f"set data.max_length={num_positions}",
        )


def train(config: RunConfig) -> dict[str, Any]:
    """Run, or resume, a training run. A collective: every rank calls it with the same config.

    Returns:
        What results.json holds; "finished" is false if the run was asked to stop early.

    Raises:
        UserError: bad input; where it can be known, before any weights load.
        LezoError: see its kinds.
    """
    distributed.init_distributed()
    check_world(config, distributed.world_size())
    torch.set_num_threads(config.train.cpu_threads)
    ds_config = load_ds_config(
        config.deepspeed, config.model.dtype, distributed.world_size(), config.train.micro_batch_size
    )
    data = load_task_data(config)
    directory = RunDirectory(config.run_dir)
    distributed.on_rank_zero(lambda: _check_before_loading(config, directory))
    engine = initialize(config.model.path, config.zo, ds_config, config.model.dtype, config.seed)
    return _Run(config, data, directory, engine).execute()


def _check_before_loading(config: RunConfig, directory: RunDirectory) -> None:
    directory.create()
    if directory.journal.exists():
        with Journal.open(directory.journal) as journal:
            header = journal.header
        # What needs the weights is taken from the journal here, and compared once they are loaded.
        ours = _header(config, header.model_fingerprint, header.parameter_table_hash)
        assert_compatible(header, ours, RESUME_MAY_DIFFER)


def _header(config: RunConfig, fingerprint: str, parameter_table: str) -> Header:
    return Header(
        noise_version=NOISE_VERSION,
        model_fingerprint=fingerprint,
        parameter_table_hash=parameter_table,
        config={**config_to_dict(config), "tokenizer": _tokenizer_hash(config.model.path)},
        libraries=library_versions(),
    )


def _tokenizer_hash(model: str) -> str:
    digest = hashlib.sha256()
    for file in sorted(resolve_model(model).iterdir()):
        if file.name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:32]


class _Run:
    """One process's part of a run. Files are rank 0's; every decision follows from what all ranks know."""

    def __init__(
        self, config: RunConfig, data: TaskData, directory: RunDirectory, engine: LezoEngine
    ) -> None:
        self._config = config
        self._data = data
        self._directory = directory
        self._engine = engine
        self._writes = engine.global_rank == 0
        self._evaluations: list[EvaluationRecord] = []
        self._steps: list[StepRecord] = []
        self._journal: Journal | None = None
        self._seconds_before = 0.0
        self._started = time.monotonic()

    def execute(self) -> dict[str, Any]:
        self._open()
        self._evaluate("test", at=0)
        with _stop_on_signals(self._engine), self._progress() as bar:
            while True:
                self._evaluate_if_due()
                self._snapshot_if_due()
                if self._engine.global_steps >= self._config.train.steps or self._engine.stop_agreed:
                    break
                self._step(bar)
        finished = self._engine.global_steps >= self._config.train.steps
        if finished:
            self._engine.load_checkpoint(self._directory.snapshots, self._steps, self._best().step)
            self._evaluate("test", at=self._best().step)
        results = self._results(finished)
        if self._writes:
            self._directory.write_results(results)
            assert self._journal is not None
            self._journal.close()
        distributed.barrier()
        return results

    def _open(self) -> None:
        """Create the journal, or open it and bring the weights to where it ends."""
        engine = self._engine
        header = _header(self._config, engine.base.fingerprint, engine.base.table_hash)
        records = distributed.on_rank_zero(lambda: self._open_journal(header))
        self._steps = [record for record in records if isinstance(record, StepRecord)]
        self._evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
        engine.load_checkpoint(self._directory.snapshots, self._steps)
        engine.attach_journal(self._journal)
        if self._writes:
            prune_snapshots(self._directory.snapshots, self._config.train.keep_snapshots)
            self._seconds_before = self._directory.cut_metrics(engine.global_steps)
            self._directory.write_facts(config_to_dict(self._config), engine.world_size, str(engine.device))
        self._started = time.monotonic()

    def _open_journal(self, header: Header) -> tuple[StepRecord | EvaluationRecord, ...]:
        path = self._directory.journal
        if not path.exists():
            self._journal = Journal.create(path, header)
            return ()
        self._journal = Journal.open(path)
        assert_compatible(self._journal.header, header, RESUME_MAY_DIFFER)
        return self._journal.records

    def _step(self, bar: Any) -> None:  # noqa: ANN401
        batch = self._data.batch(self._config, self._engine.global_steps)
        record = self._engine.train_batch(batch, training_objective(self._data.task.kind).loss)
        self._steps.append(record)
        gradient = record.projected_grads[0] if record.applied else None
        self._log({"loss": record.loss, "projected_gradient": gradient, "applied": record.applied})
        bar.update()
        bar.set_postfix(loss=record.loss, g=gradient, refresh=False)

    def _log(self, values: dict[str, Any]) -> None:
        if not self._writes:
            return
        step = self._engine.global_steps
        self._directory.log_metrics({"step": step, **values, "seconds": round(self._seconds(), 3)})
        monitor = self._engine.monitor
        if monitor.enabled:
            events = [
                (f"train/{name}", float(value), step) for name, value in values.items() if value is not None
            ]
            monitor.write_events(events)

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _found(self, split: str, step: int) -> EvaluationRecord | None:
        return next((e for e in self._evaluations if e.split == split and e.step == step), None)

    def _evaluate_if_due(self) -> None:
        step, train = self._engine.global_steps, self._config.train
        if step > 0 and (step % train.eval_every == 0 or step == train.steps):
            self._evaluate("dev", at=step)

    def _evaluate(self, split: str, at: int) -> None:
        """Evaluate the present weights, which have seen `at` steps, unless the journal has it already."""
        if self._engine.global_steps != at or self._found(split, at):
            return
        result = self._score(self._data.dev if split == "dev" else self._data.test)
        metrics = {"accuracy": result.accuracy, "majority_class": result.majority_class}
        loss = result.loss if result.loss == result.loss and abs(result.loss) != float("inf") else None
        record = EvaluationRecord(step=at, split=split, loss=loss, metrics=metrics)
        if self._journal is not None:
            self._journal.append(record)
        self._evaluations.append(record)
        self._log({f"{split}_loss": loss, f"{split}_accuracy": result.accuracy})
        if self._writes:
            logger.info("step %d: %s loss %s, accuracy %.4f", at, split, loss, result.accuracy)

    def _score(self, split: EncodedSplit) -> EvaluationResult:
        batch_size, pad_id = self._config.train.eval_batch_size, self._data.tokenizer.pad_id
        return evaluate(self._engine, self._data.task.kind, split.examples, split.encoded, pad_id, batch_size)

    def _snapshot_if_due(self) -> None:
        step, train = self._engine.global_steps, self._config.train
        every = train.eval_every if train.snapshot_every is None else train.snapshot_every
        due = step == train.steps or (every > 0 and step > 0 and step % every == 0)
        root = self._directory.snapshots
        if not due or distributed.on_rank_zero(lambda: read_manifest(snapshot_path(root, step)) is not None):
            return
        self._engine.save_checkpoint(root)
        if self._writes:
            prune_snapshots(root, train.keep_snapshots)

    def _best(self) -> EvaluationRecord:
        """Return the evaluation with the lowest validation loss, the first of equals (as the paper picks)."""
        losses = [record for record in self._evaluations if record.split == "dev"]
        return min(losses, key=lambda record: float("inf") if record.loss is None else record.loss)

    def _results(self, finished: bool) -> dict[str, Any]:
        zero_shot = self._found("test", 0)
        best = self._best() if finished else None
        final = self._found("test", best.step) if best else None
        return {
            "task": self._data.task.name,
            "metric": self._data.task.metric,
            "protocol": self._config.data.protocol,
            "finished": finished,
            "zero_shot": _accuracy(zero_shot),
            "test": _accuracy(final),
            "majority_class": zero_shot.metrics["majority_class"] if zero_shot else None,
            "best_step": best.step if best else None,
            "best_dev_loss": best.loss if best else None,
            "steps": len(self._steps),
            "skipped_steps": sum(not record.applied for record in self._steps),
            "seconds": round(self._seconds(), 3),
            "bytes_per_step": self._bytes_per_step(),
            "model_fingerprint": self._engine.base.fingerprint,
            "weights_digest": self._engine.weights.digest(),
            "world_size": self._engine.world_size,
            "versions": library_versions(),
        }

    def _bytes_per_step(self) -> dict[str, int]:
        """Return what a step sends: gathered weights (each rank builds them), and everything else."""
        train, parameters = self._config.train, self._engine.weights.parameters
        num_micro_batches = train.batch_size // train.micro_batch_size
        passes = (
            num_micro_batches // self._engine.world_size * (1 if self._config.zo.forward == "dual" else 2)
        )
        model = sum(p.numel * p.parameter.element_size() for p in parameters)
        return {
            "gathered": model * passes if self._engine.world_size > 1 else 0,
            "other": PLAN_BYTES + 8 * (2 * num_micro_batches + 1),
        }

    def _progress(self) -> Any:  # noqa: ANN401
        total, done = self._config.train.steps, self._engine.global_steps
        shown = self._writes and sys.stderr.isatty()
        return tqdm(total=total, initial=done, disable=not shown, desc="training", smoothing=0.05)


def _accuracy(record: EvaluationRecord | None) -> float | None:
    return record.metrics["accuracy"] if record else None


class _stop_on_signals:  # noqa: N801  # a context manager, named as one
    """While open, SIGTERM, SIGINT and SIGUSR1 ask all ranks to stop after the next step."""

    _SIGNALS: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, engine: LezoEngine) -> None:
        self._engine = engine
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        for number in self._SIGNALS:
            self._before[number] = signal.signal(number, lambda *_: self._engine.request_stop())

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
