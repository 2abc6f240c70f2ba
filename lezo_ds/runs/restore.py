"""Open a run that has ended or was interrupted, and restore the weights of one of its steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lezo_ds import distributed
from lezo_ds.config import RunConfig
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import UserError
from lezo_ds.files import sync
from lezo_ds.journal import EvaluationRecord, Header, read_journal
from lezo_ds.model.snapshots import SnapshotOwner, read_manifest, snapshot_path, snapshot_steps
from lezo_ds.noise import NOISE_VERSION
from lezo_ds.runs.header import assert_same_model_config, config_of, journal_owner
from lezo_ds.runs.run import best_evaluation
from lezo_ds.runs.run_directory import RunDirectory
from lezo_ds.runs.trainer import make_engine
from lezo_ds.runs.training_state import read_training_state, weights_removed
from lezo_ds.zo.records import StepRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordedRun:
    """The records in a run's directory.

    Attributes:
        directory: directory of the run.
        header: what the run was started with.
        config: configuration of the run, with overrides applied.
        num_steps: number of steps done. For a first-order run, those up to its last checkpoint.
        steps: all steps of a zeroth-order run, from 0. A first-order run records none.
        evaluations: all evaluations in order.
        owner: what the manifests of its snapshots must have.
    """

    directory: RunDirectory
    header: Header
    config: RunConfig
    num_steps: int
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    owner: SnapshotOwner

    def find_step(self, step: str) -> int:
        """Return the number of updates for "best" (lowest validation loss), "last" or a number as text.

        Raises:
            UserError: the run has no such step, or it is a first-order run whose weights were removed.
        """
        number = self._number_of(step)
        if self.config.method == "adamw":
            kept: Sequence[int] = self._snapshots()
            if self.num_steps > 0 and not kept and not self.directory.checkpoints.is_dir():
                raise weights_removed(self.directory.path)
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

    def _snapshots(self) -> list[int]:
        root = self.directory.snapshots
        manifests = {step: read_manifest(snapshot_path(root, step)) for step in snapshot_steps(root)}
        return [step for step, found in manifests.items() if found and self._may_own(step, found)]

    def _may_own(self, step: int, manifest: Mapping[str, Any]) -> bool:
        is_own = self.owner.owns(step, manifest)
        if is_own is None:  # of an earlier version; no replay could make it anew
            place = snapshot_path(self.directory.snapshots, step)
            logger.warning("snapshot %s does not say to which run it belongs, which is unchecked", place)
        return is_own is not False

    def _number_of(self, step: str) -> int | None:
        if step == "last":
            return self.num_steps
        if step == "best":
            best = best_evaluation(self.evaluations)
            if best is None:
                raise UserError(
                    f"run {self.directory.path} has no evaluation yet, so it has no best step",
                    got=f"{self.num_steps} steps",
                    expected="a validation loss",
                    fix="use --step last, or resume the run",
                )
            return best.step
        return int(step) if step.isdecimal() else None


def read_run(path: Path, overrides: tuple[str, ...] = ()) -> RecordedRun:
    """Read a run's directory.

    Args:
        path: directory of the run.
        overrides: key=value changes to its configuration, for a model or data that have moved since.

    Raises:
        UserError: there is no run in this directory.
        JournalError: the journal is damaged.
    """
    directory = RunDirectory(path)
    steps: tuple[StepRecord, ...] = ()
    if directory.training_state.is_file():
        state = read_training_state(directory.training_state)
        header, num_steps, evaluations = state.header, state.step, state.evaluations
        owner = state.owner
    elif directory.journal.is_file():
        header, records = read_journal(directory.journal)
        # What the caller writes must not outlive the last line of a running process.
        with suppress(OSError):  # a disk that cannot be written has nothing to sync
            sync(directory.journal)
        steps = tuple(record for record in records if isinstance(record, StepRecord))
        evaluations = tuple(record for record in records if isinstance(record, EvaluationRecord))
        num_steps = len(steps)
        owner = journal_owner(header, records)
    else:
        raise UserError(
            f"{path} is not the directory of a run",
            got="neither journal.jsonl nor training_state.json in it",
            expected="the run_dir of a run",
            fix="give the run_dir that lezo-ds train printed",
        )
    return RecordedRun(
        directory=directory,
        header=header,
        config=config_of(header, directory.path, overrides),
        num_steps=num_steps,
        steps=steps,
        evaluations=evaluations,
        owner=owner,
    )


def restore(run: RecordedRun, step: int) -> LezoEngine:
    """Return an engine with exactly the weights that the run had after `step` updates. A collective.

    Raises:
        UserError: the run was made with another base model or another noise version.
        LezoError: a snapshot's weights do not have the digest in its manifest.
    """
    if run.header.noise_version != NOISE_VERSION:
        raise UserError(
            f"run {run.directory.path} was made with another noise version",
            got=f"version {run.header.noise_version}",
            expected=f"version {NOISE_VERSION}",
            fix="use the version of this package that made the run, "
            f"or open one of its snapshots in {run.directory.snapshots}",
        )
    distributed.on_rank_zero(lambda: assert_same_model_config(run.header, run.config.model.path))
    engine = make_engine(run.config)
    if engine.base.fingerprint != run.header.model_fingerprint:
        raise UserError(
            f"{run.config.model.path} is not the base model of the run",
            got=f"fingerprint {engine.base.fingerprint}",
            expected=run.header.model_fingerprint,
            fix="add model.path=... with the directory of the base model",
        )
    if run.config.method == "adamw":
        engine.load_model(snapshot_path(run.directory.snapshots, step), step)
    else:
        if distributed.rank() == 0 and step > 0 and not snapshot_steps(run.directory.snapshots):
            text = "the run keeps no snapshots: step %d is replayed from the base weights and the journal"
            logger.info(text, step)
        engine.load_checkpoint(run.directory.snapshots, run.steps, step, run.owner)
    return engine
