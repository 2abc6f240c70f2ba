"""A finished or interrupted run, opened again: the weights of any of its steps, from base and journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lezo_ds import distributed
from lezo_ds.config import RunConfig
from lezo_ds.engine.lezo_engine import LezoEngine
from lezo_ds.errors import UserError
from lezo_ds.journal import EvaluationRecord, Header, StepRecord, read_journal
from lezo_ds.model.snapshots import read_manifest, snapshot_path, snapshot_steps
from lezo_ds.noise import noise_version
from lezo_ds.runs.header import config_of
from lezo_ds.runs.run import best_evaluation
from lezo_ds.runs.run_directory import RunDirectory
from lezo_ds.runs.trainer import make_engine
from lezo_ds.runs.training_state import read_training_state


@dataclass(frozen=True)
class RecordedRun:
    """What a run's directory says of it.

    Attributes:
        directory: of the run.
        header: what it was begun with.
        config: it was made with, overrides applied.
        num_steps: how many it has done; of a first-order run, up to its last checkpoint.
        steps: all steps of a zeroth-order run, from 0; a first-order one keeps none.
        evaluations: all of them, in order.
    """

    directory: RunDirectory
    header: Header
    config: RunConfig
    num_steps: int
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]

    def find_step(self, step: str) -> int:
        """Return the number of updates that "best" (lowest validation loss), "last" or a number stands for.

        Raises:
            UserError: the run has no such step.
        """
        number = self._number_of(step)
        if self.config.method == "adamw":
            kept: Sequence[int] = self._snapshots()
            numbers = f"a step with a snapshot: {', '.join(map(str, kept)) or 'none yet'}"
        else:
            kept, numbers = range(self.num_steps + 1), f"0 to {self.num_steps}"
        if number is None or number not in kept:
            raise UserError(
                f"run {self.directory.path} has no step {step}",
                got=step,
                expected=f"best, last, or {numbers}",
                fix="set --step to one of these",
            )
        return number

    def _number_of(self, step: str) -> int | None:
        if step == "last":
            return self.num_steps
        if step == "best":
            best = best_evaluation(self.evaluations)
            if best is None:
                raise UserError(
                    f"run {self.directory.path} has no evaluation yet to pick the best step by",
                    got=f"{self.num_steps} steps",
                    expected="a validation loss",
                    fix="use --step last, or resume the run",
                )
            return best.step
        return int(step) if step.isdecimal() else None

    def _snapshots(self) -> list[int]:
        root = self.directory.snapshots
        return [step for step in snapshot_steps(root) if read_manifest(snapshot_path(root, step))]


def read_run(path: Path, overrides: tuple[str, ...] = ()) -> RecordedRun:
    """Read a run's directory.

    Args:
        path: the run's directory.
        overrides: key=value changes to its config, for a model or data that have moved since.

    Raises:
        UserError: no run there.
        JournalError: its journal is damaged.
    """
    directory = RunDirectory(path)
    if directory.training_state.is_file():
        return _read_first_order_run(directory, overrides)
    if not directory.journal.is_file():
        raise UserError(
            f"{path} is not the directory of a run",
            got="neither journal.jsonl nor training_state.json in it",
            expected="the run_dir of a run",
            fix="give the run_dir that launch/train.py printed",
        )
    header, records = read_journal(directory.journal)
    config = config_of(header, directory.path, overrides)
    steps = tuple(record for record in records if isinstance(record, StepRecord))
    evaluations = tuple(record for record in records if isinstance(record, EvaluationRecord))
    return RecordedRun(directory, header, config, len(steps), steps, evaluations)


def _read_first_order_run(directory: RunDirectory, overrides: tuple[str, ...]) -> RecordedRun:
    state = read_training_state(directory.training_state)
    config = config_of(state.header, directory.path, overrides)
    return RecordedRun(directory, state.header, config, state.step, (), state.evaluations)


def restore(run: RecordedRun, step: int) -> LezoEngine:
    """Return an engine that holds the run's weights after `step` updates, bit for bit. A collective.

    Raises:
        UserError: another base model, or another noise, than the run was made with.
    """
    ours = noise_version(distributed.device())
    if run.header.noise_version != ours:
        raise UserError(
            f"run {run.directory.path} was made with another noise",
            got=f"version {run.header.noise_version}",
            expected=f"version {ours}, that of this package and machine",
            fix="use the version of this package that made the run; "
            f"or open one of its snapshots, in {run.directory.snapshots}",
        )
    engine = make_engine(run.config)
    if engine.base.fingerprint != run.header.model_fingerprint:
        raise UserError(
            f"{run.config.model.path} is not the model the run was made with",
            got=f"fingerprint {engine.base.fingerprint}",
            expected=run.header.model_fingerprint,
            fix="add model.path=... with the base model's directory",
        )
    if run.config.method == "adamw":
        engine.load_model(snapshot_path(run.directory.snapshots, step), step)
    else:
        engine.load_checkpoint(run.directory.snapshots, run.steps, step)
    return engine
