"""Open a run that has ended or was interrupted, and restore the weights of one of its steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lezo_ds import distributed
from lezo_ds.config import RunConfig
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import UserError
from lezo_ds.files import sync
from lezo_ds.journal import EvaluationRecord, Header, JournalRecord, read_journal, step_checksums
from lezo_ds.model.snapshots import SnapshotOwner, read_facts, read_manifest, snapshot_path, snapshot_steps
from lezo_ds.noise import NOISE_VERSION
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.first_order import read_training_state, weights_removed
from lezo_ds.runs.header import assert_same_model_config, config_of
from lezo_ds.runs.run import best_evaluation
from lezo_ds.runs.trainer import make_engine
from lezo_ds.zo.records import StepRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecordedRun:
    """The records of a run: of its directory, or of an exported journal."""

    directory: RunDirectory  # of an exported journal, that file: there are no snapshots in it
    header: Header
    config: RunConfig  # with overrides applied
    records: Sequence[JournalRecord]  # of a first-order run, its evaluations
    num_steps: int  # of a first-order run, up to its last checkpoint
    owner: SnapshotOwner
    digests: Mapping[int, str]  # of the weights after some steps

    @property
    def steps(self) -> list[StepRecord]:
        """The steps of a zeroth-order run, from 0."""
        return [record for record in self.records if isinstance(record, StepRecord)]

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        """All evaluations in order."""
        return [record for record in self.records if isinstance(record, EvaluationRecord)]

    def find_step(self, step: str) -> int:
        """Return the number of updates for "best" (lowest validation loss), "last" or a number."""
        number = int(step) if step.isdecimal() else None
        if step == "last":
            number = self.num_steps
        elif step == "best":
            best = best_evaluation(self.evaluations)
            if best is None:
                raise UserError(
                    f"run {self.directory.path} has no evaluation yet, so it has no best step",
                    fix="use --step last, or resume the run",
                )
            number = best.step
        kept: Sequence[int] = range(self.num_steps + 1)
        expected = f"0 to {self.num_steps}"
        if self.config.method == "adamw":
            kept = self._snapshots()
            if self.num_steps > 0 and not kept and not self.directory.checkpoints.is_dir():
                raise weights_removed(self.directory.path)
            expected = f"a step with a snapshot ({', '.join(map(str, kept)) or 'none yet'})"
        if number is None or number not in kept:
            raise UserError(
                f"run {self.directory.path} has no step {step}",
                fix=f"set --step to best, last, or {expected}",
            )
        return number

    def _snapshots(self) -> list[int]:
        root = self.directory.snapshots
        manifests = {step: read_manifest(snapshot_path(root, step)) for step in snapshot_steps(root)}
        return [step for step, facts in manifests.items() if facts and self.owner.owns(step, facts)]


def read_run(path: Path, overrides: Sequence[str] = ()) -> RecordedRun:
    """Read a run's directory. `key=value` overrides change its configuration, such as a moved model."""
    directory = RunDirectory(path)
    if directory.training_state.is_file():
        state = read_training_state(directory.training_state)
        header, num_steps, owner = state.header, state.step, state.owner
        records: Sequence[JournalRecord] = state.evaluations
    elif directory.journal.is_file():
        header, records = read_journal(directory.journal)
        # What the caller writes must not outlive the last line of a running process.
        with suppress(OSError):  # a disk that cannot be written has nothing to sync
            sync(directory.journal)
        num_steps = sum(isinstance(record, StepRecord) for record in records)
        owner = SnapshotOwner(header.model_fingerprint, step_checksums(header, records))
    else:
        raise UserError(
            f"{path} is not the directory of a run: it has no journal.jsonl and no training_state.json",
            fix="use the run_dir that lezo-ds train printed",
        )
    return RecordedRun(
        directory,
        header,
        config_of(header, path, overrides),
        records=records,
        num_steps=num_steps,
        owner=owner,
        digests=_digests(directory, owner),
    )


def _digests(directory: RunDirectory, owner: SnapshotOwner) -> dict[int, str]:
    """Return the digests in a run's results and snapshots, by the number of updates."""
    root = directory.snapshots
    facts = {step: read_facts(snapshot_path(root, step)) for step in snapshot_steps(root)}
    digests = {step: found["digest"] for step, found in facts.items() if found and owner.owns(step, found)}
    results = directory.read_results()
    if results:
        step = results["best_step"] if results["finished"] else results["steps"]
        digests[step or 0] = results["weights_digest"]
    return digests


def restore(run: RecordedRun, step: int) -> LezoEngine:
    """Return an engine with exactly the weights that the run had after `step` updates. A collective."""
    if run.header.noise_version != NOISE_VERSION:
        raise UserError(
            f"run {run.directory.path} has noise version {run.header.noise_version}, not {NOISE_VERSION}",
            fix="use the version of lezo_ds that wrote it, or open one of its snapshots",
        )
    distributed.on_rank_zero(lambda: assert_same_model_config(run.header, run.config.model.path))
    # A replay reads the records only. Neither the estimator nor the layer policy, which may be a user's code,
    # is needed for it.
    zo = replace(run.config.zo, estimator="spsa", estimator_options={}, directions=1, learning_rate=0.0)
    zo = replace(zo, layer_policy="uniform", layer_policy_options={}, sparsity=0.0, lr_schedule="constant")
    engine = make_engine(replace(run.config, zo=zo))
    if engine.base.fingerprint != run.header.model_fingerprint:
        raise UserError(
            f"{run.config.model.path} is not the base model of the run: its fingerprint is "
            f"{engine.base.fingerprint}, not {run.header.model_fingerprint}",
            fix="add model.path=... with the directory of the base model",
        )
    if run.config.method == "adamw":
        engine.load_model(snapshot_path(run.directory.snapshots, step), step)
        return engine
    if distributed.rank() == 0 and step > 0 and not snapshot_steps(run.directory.snapshots):
        logger.info("step %d is replayed from the base weights and the journal", step)
    engine.load_checkpoint(run.directory.snapshots, run.steps, step, run.owner)
    return engine
