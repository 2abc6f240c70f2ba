"""What a run records: a header with its inputs, steps and evaluations; and which runs can continue it."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import Repr
from typing import Any

import lezo_ds
from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.checkpoints.sharded_model import BaseModel
from lezo_ds.checkpoints.snapshots import SnapshotOwner, own_snapshots, read_manifest, snapshot_path
from lezo_ds.config import RunConfig, config_from_dict, config_to_dict, may_differ_on_resume
from lezo_ds.config.deepspeed import tensor_parallel_of
from lezo_ds.config.schema import READER
from lezo_ds.data.task_data import TaskData
from lezo_ds.errors import UserError
from lezo_ds.files import DAMAGE
from lezo_ds.forward.module_calls import norm_arithmetic
from lezo_ds.journal import EvaluationRecord, Header, JournalRecord, header_checksum, read_journal
from lezo_ds.noise import NOISE_VERSION
from lezo_ds.runs.directory import RunDirectory, library_versions
from lezo_ds.runs.results import RunResults
from lezo_ds.zo.records import StepRecord

logger = logging.getLogger(__name__)

_INPUTS = ("tokenizer", "model_config", "data_fingerprints", "digests")
"""Entries of a header's configuration that are not keys. Only an exported journal has digests, of weights."""

_SHORT = Repr()  # of a value that may be long, or deep
_SHORT.maxstring = 100

_UNIMPORTANT = ("_name_or_path", "transformers_version")
"""Keys of a model's config.json that change if the model is only copied or saved again."""


def make_header(
    config: RunConfig, data: TaskData, fingerprint: str, parameter_table: str
) -> Header:
    """Return the header of a run; `parameter_table` is the hash of the parameters' names, ids and shapes."""
    model = resolve_model(config.model.path)
    device = distributed.device()
    keys = {key: value for key, value in config_to_dict(config).items() if key != "run_dir"}
    # A sum over ranks has other last bits than one rank's. Updates do not.
    size = tensor_parallel_of(config)
    split = {"tensor_parallel": str(size)} if size > 1 else {}
    splits = {"train": data.train, "dev": data.dev, "test": data.test}
    inputs = {
        "tokenizer": _tokenizer_hash(model),
        "model_config": _model_config(model),
        "data_fingerprints": {name: split.fingerprint() for name, split in splits.items()},
    }
    return Header(
        noise_version=NOISE_VERSION,
        model_fingerprint=fingerprint,
        parameter_table_hash=parameter_table,
        config=keys | inputs,
        libraries=library_versions(),
        arithmetic={**distributed.describe_arithmetic(device), **norm_arithmetic(device), **split},
    )


def config_of(header: Header, run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration in a header, with `key=value` overrides. No module is imported."""
    values = {key: value for key, value in header.config.items() if key not in _INPUTS}
    where = f"run {run_dir}"
    # A refusal names both versions: an older one had keys and values that are gone.
    version = header.libraries.get("lezo_ds")
    if version != lezo_ds.__version__:
        where += f" (written by lezo_ds {version}; this is {lezo_ds.__version__})"
    return config_from_dict(values | {"run_dir": str(run_dir)}, where, overrides, recorded=True)


def assert_same_run(recorded: Header, ours: Header, may_differ: Collection[str]) -> None:
    """Refuse to continue a run with other inputs. Other libraries and processors only cause a warning."""

    def facts(header: Header) -> dict[str, Any]:
        hashes = {
            "model_fingerprint": header.model_fingerprint,
            "parameters": header.parameter_table_hash,
        }
        return {"noise_version": header.noise_version, **hashes, **header.config}

    for key, old, new in _differences(facts(recorded), facts(ours)):
        # A key that is younger than the run had its default.
        default = _SHORT.repr(READER.keys.get(key, {}).get("default"))
        if key not in may_differ and (old, new) != (_SHORT.repr("absent"), default):
            version, own_version = recorded.libraries.get("lezo_ds"), ours.libraries["lezo_ds"]
            by = (
                ""
                if version == own_version
                else f", written by lezo_ds {version} (this is {own_version})"
            )
            text = f"{key} differs from the journal's{by}: it is {new}, and was {old}"
            raise UserError(
                text, fix="use the inputs that the run was started with, or another run_dir"
            )
    machine, our_machine = (
        recorded.libraries | recorded.arithmetic,
        ours.libraries | ours.arithmetic,
    )
    for key, old, new in _differences(machine, our_machine):
        logger.warning("%s was %s when the journal was started and is %s now", key, old, new)


def assert_same_base(recorded: Header, base: BaseModel) -> None:
    """Refuse to continue a run on other base weights. `check_records` has compared everything else."""
    ours = replace(
        recorded, model_fingerprint=base.fingerprint, parameter_table_hash=base.table_hash
    )
    assert_same_run(recorded, ours, ())


def assert_same_model_config(recorded: Header, model: str) -> None:
    """Refuse to restore the weights of a run into a base model with another config.json."""
    directory = resolve_model(model)
    theirs, ours = {"": recorded.config.get("model_config")}, {"": _model_config(directory)}
    for key, old, new in _differences(theirs, ours):
        text = f"{key[1:]} in {directory / 'config.json'} differs from the run's: it is {new}, and was {old}"
        raise UserError(text, fix="add model.path=... with the directory of the base model")


def _model_config(model: Path) -> dict[str, Any]:
    # JSON has no infinity, but Python writes and reads one. The journal keeps it as a string.
    values = json.loads((model / "config.json").read_text(), parse_constant=str)
    return {key: value for key, value in values.items() if key not in _UNIMPORTANT}


def _tokenizer_hash(model: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(model.iterdir()):
        if file.name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def _differences(
    left: Mapping[str, Any], right: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield the dotted key and both values, in short, of each item that differs between two nested dicts."""
    for name in sorted(left.keys() | right.keys()):
        old, new = left.get(name, "absent"), right.get(name, "absent")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", _SHORT.repr(old), _SHORT.repr(new)


def steps_of(records: Iterable[JournalRecord]) -> list[StepRecord]:
    return [record for record in records if isinstance(record, StepRecord)]


def evaluations_of(records: Iterable[JournalRecord]) -> list[EvaluationRecord]:
    return [record for record in records if isinstance(record, EvaluationRecord)]


def owner_of(header: Header, step_checksums: Sequence[str] = ()) -> SnapshotOwner:
    """Return the owner of a run's snapshots.

    Args:
        header: the header of the run.
        step_checksums: those of its journal. Without a journal, as of AdamW, all snapshots have the
            checksum of the header.
    """
    return SnapshotOwner(header.model_fingerprint, step_checksums or (header_checksum(header),))


def best_evaluation(
    evaluations: Sequence[EvaluationRecord], first_step: int = 0
) -> EvaluationRecord | None:
    """Return the first evaluation with the lowest validation loss. It may be that of the base model, at 0."""
    losses = [
        record for record in evaluations if record.split == "dev" and record.step >= first_step
    ]
    return min(
        losses, key=lambda record: math.inf if record.loss is None else record.loss, default=None
    )


def is_worse_than_base(evaluations: Sequence[EvaluationRecord]) -> bool:
    """Return whether no validation loss after a step was below that of the base model."""
    trained = best_evaluation(evaluations, first_step=1)
    return trained is not None and best_evaluation(evaluations) is not trained


def stopping_step(evaluations: Sequence[EvaluationRecord], patience: int | None) -> int | None:
    """Return the first step with `patience` validations in a row not better than the best before; or None.

    The first one after step 0 counts as better: many runs have to fall behind the base model first.
    """
    lowest, num_worse = math.inf, 0
    for record in evaluations:
        if record.split != "dev" or record.step == 0:
            continue
        loss = math.inf if record.loss is None else record.loss
        num_worse = 0 if loss < lowest else num_worse + 1
        lowest = min(lowest, loss)
        if num_worse == patience:
            return record.step
    return None


@dataclass(frozen=True)
class TrainingState:
    """The content of training_state.json, the records of AdamW, which name the checkpoint to resume from."""

    header: Header
    world_size: int  # the optimizer states in the checkpoint have one shard per rank
    step: int = 0  # that the checkpoint has seen; 0 if there is none yet
    evaluations: tuple[EvaluationRecord, ...] = ()  # those after the checkpoint are repeated

    @classmethod
    def read(cls, path: Path) -> TrainingState:
        try:
            values = json.loads(path.read_text())
            header = Header(**values["header"])
            evaluations = tuple(EvaluationRecord(**record) for record in values["evaluations"])
            if not type(values["world_size"]) is type(values["step"]) is int:
                raise TypeError("world_size or step is no integer")
            return cls(header, values["world_size"], values["step"], evaluations)
        except DAMAGE as error:
            text = f"{path} cannot be read: {type(error).__name__}: {error}"
            raise UserError(text, fix="restore it from a copy, or use another run_dir") from error


@dataclass(frozen=True)
class RecordedRun:
    """The records of a run: of its directory, or of an exported journal."""

    directory: RunDirectory  # of an exported journal, that file: there are no snapshots in it
    header: Header
    config: RunConfig  # with overrides applied
    records: Sequence[JournalRecord]  # of a first-order run, its evaluations
    num_steps: int  # of a first-order run, up to its last checkpoint
    digests: Mapping[int, str]  # of the weights after some steps
    owner: SnapshotOwner  # of the snapshots

    def find_step(self, step: str) -> int:
        """Return the number of updates for "best" (lowest validation loss), "last" or a number."""
        path, evaluations = self.directory.path, evaluations_of(self.records)
        best = best_evaluation(evaluations)
        if step == "best" and best_evaluation(evaluations, first_step=1) is None:
            fix = "use --step last, or resume the run"
            raise UserError(
                f"run {path} has no evaluation after a step, so it has no best step", fix=fix
            )
        named = {"last": self.num_steps, "best": best.step if best else None}
        found = named.get(step, int(step) if step.isdecimal() else None)
        kept: Sequence[int] = range(self.num_steps + 1)
        expected = f"0 to {self.num_steps}"
        if self.config.method == "adamw" and found != 0:  # the base model needs no snapshot
            root = self.directory.snapshots
            own, _ = own_snapshots(root, self.owner)
            kept = [number for number in own if read_manifest(snapshot_path(root, number))]
            if self.num_steps > 0 and not kept and not self.directory.checkpoints.is_dir():
                raise _weights_removed(path)
            expected = f"a step with a snapshot ({', '.join(map(str, kept)) or 'none yet'})"
        if found is None or found not in kept:
            raise UserError(
                f"run {path} has no step {step}", fix=f"set --step to best, last, or {expected}"
            )
        return found


def read_run(path: Path, overrides: Sequence[str] = ()) -> RecordedRun:
    """Read a run's directory. `key=value` overrides change its configuration, such as a moved model."""
    directory = RunDirectory(path)
    if (recorded := _read_records(directory)) is None:
        text = f"{path} is not the directory of a run: it has no journal.jsonl and no training_state.json"
        raise UserError(text, fix="use the run_dir that lezo-ds train printed")
    header, records, num_steps, _, owner = recorded
    own, _ = own_snapshots(directory.snapshots, owner)
    digests: dict[int, Any] = {step: manifest.get("digest") for step, manifest in own.items()}
    results = RunResults.read(directory.results)
    if results is not None:
        digests[results.step_of_weights] = results.weights_digest
    digests = {step: digest for step, digest in digests.items() if isinstance(digest, str)}
    return RecordedRun(
        directory, header, config_of(header, path, overrides), records, num_steps, digests, owner
    )


def _read_records(
    directory: RunDirectory,
) -> tuple[Header, Sequence[JournalRecord], int, int | None, SnapshotOwner] | None:
    """Return the records of a run, or None if it has none.

    They are the header, the records (of AdamW, evaluations), the number of steps, that of ranks if
    it is fixed, and the owner of the snapshots.
    """
    if directory.training_state.exists():
        state = TrainingState.read(directory.training_state)
        owner = owner_of(state.header)
        return state.header, state.evaluations, state.step, state.world_size, owner
    if directory.journal.exists():
        header, records, step_checksums = read_journal(directory.journal)
        return header, records, len(steps_of(records)), None, owner_of(header, step_checksums)
    return None


def check_records(
    config: RunConfig, data: TaskData, directory: RunDirectory, num_ranks: int
) -> None:
    """Refuse, before weights are loaded, to resume a run as another one."""
    if config.method == "adamw" and config.partition_size not in (None, num_ranks):
        text = f"method adamw shards the weights among all ranks; partition_size={config.partition_size}"
        raise UserError(text, fix="set partition_size=null")
    if (recorded := _read_records(directory)) is None:
        return
    header, _, num_done, world_size, _ = recorded
    ours = make_header(config, data, header.model_fingerprint, header.parameter_table_hash)
    assert_same_run(header, ours, may_differ_on_resume(config))
    if config.train.steps is not None and config.train.steps < num_done:
        text = (
            f"run {directory.path} has {num_done} steps already; train.steps={config.train.steps}"
        )
        raise UserError(text, fix=f"set train.steps={num_done} or more, or another run_dir")
    if world_size is not None and num_done > 0:
        if world_size != num_ranks:
            text = f"the checkpoint of a first-order run has {world_size} ranks, not {num_ranks}"
            raise UserError(text, fix=f"start {world_size} ranks, or use another run_dir")
        if not snapshot_path(directory.checkpoints, num_done).is_dir():
            raise _weights_removed(directory.path)


def _weights_removed(run_dir: Path) -> UserError:
    text = f"run {run_dir} has no weights: train.keep_snapshots=0 removed them, and adamw has no journal"
    fix = f"train again: --config {run_dir / 'config.yaml'} run_dir=NEW train.keep_snapshots=1"
    return UserError(text, fix=fix)
