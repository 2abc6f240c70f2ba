"""What a run records, which runs can continue it, and what follows from its evaluations.

A header has all inputs of a run: the configuration, and hashes of the base weights, the tokenizer
and the data. Who resumes a run builds the header anew and compares it with the recorded one. Where
the records are depends on the method:

    journal.jsonl          header, steps and evaluations (lezo_ds/journal.py)
    training_state.json    header, evaluations and the step of the checkpoint (TrainingState)

`read_run` reads either as a `RecordedRun`, for commands that use a run and do not continue it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import math
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import Repr
from typing import Any

from pydantic import TypeAdapter

import lezo_ds
from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.checkpoints.sharded_model import BaseModel
from lezo_ds.checkpoints.snapshots import SnapshotOwner, own_snapshots
from lezo_ds.config import RunConfig, config_from_dict, may_differ_on_resume
from lezo_ds.config.deepspeed import tensor_parallel_of
from lezo_ds.config.load import default_of
from lezo_ds.config.schema import KEYS
from lezo_ds.data.task_data import TaskData
from lezo_ds.errors import UserError
from lezo_ds.files import read_regular
from lezo_ds.forward.adapters import start_of
from lezo_ds.journal import EvaluationRecord, Header, JournalRecord, header_checksum, read_journal
from lezo_ds.noise import NOISE_VERSION
from lezo_ds.registry import names_code
from lezo_ds.runs.directory import RunDirectory, library_versions
from lezo_ds.runs.results import RunResults
from lezo_ds.zo.records import StepRecord

logger = logging.getLogger(__name__)

_INPUTS = ("tokenizer", "adapter", "model_config", "data_fingerprints", "digests")
"""Entries of a header's configuration that are no keys. Only an exported journal has digests."""

_SHORT = Repr()  # of a value that may be long, or deep
_SHORT.maxstring = 100

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")

_BEFORE_TRAINER = ("0.1.", "0.2.", "0.3.", "0.4.", "0.5.")
"""Beginnings of the versions with checkpoints of their own for AdamW."""
_UNIMPORTANT = ("_name_or_path", "transformers_version")
"""Keys of a model's config.json that change if the model is only copied or saved again."""


# Headers.


def make_header(
    config: RunConfig, data: TaskData, fingerprint: str, parameter_table: str
) -> Header:
    """Return the header of a run.

    Args:
        config: of the run.
        data: its encoded splits.
        fingerprint: digest of the base weights.
        parameter_table: hash of the parameters' names, ids and shapes.
    """
    model = resolve_model(config.model.path)
    inputs = config.model_dump()
    del inputs["run_dir"]
    tokenizer = hashlib.sha256()
    for file in sorted(model.iterdir()):
        if file.name in _TOKENIZER_FILES:
            tokenizer.update(file.name.encode() + file.read_bytes())
    inputs["tokenizer"] = tokenizer.hexdigest()[:32]
    if config.peft.path is not None:
        inputs["adapter"] = start_of(config.peft)
    inputs["model_config"] = _model_config(model)
    inputs["data_fingerprints"] = {
        "train": data.train.fingerprint(),
        "dev": data.dev.fingerprint(),
        "test": data.test.fingerprint(),
    }
    arithmetic = distributed.describe_arithmetic(distributed.device())
    size = tensor_parallel_of(config)
    if size > 1:  # a sum over ranks has other last bits than one rank's
        arithmetic["tensor_parallel"] = str(size)
    return Header(
        noise_version=NOISE_VERSION,
        model_fingerprint=fingerprint,
        parameter_table_hash=parameter_table,
        config=inputs,
        libraries=library_versions(),
        arithmetic=arithmetic,
    )


def with_start_date(config: RunConfig) -> RunConfig:
    """Return the configuration of a run to start or to resume, with the day on which it started.

    Chat templates may write the day, and a run goes on with the texts that it started with. An
    older version of this package recorded none: its run has the day of today.
    """
    if not config.data.in_chat or config.data.date is not None:
        return config
    recorded = _read_records(RunDirectory(config.run_dir))
    day: str | None = datetime.date.today().isoformat()
    if recorded is not None:
        data = recorded.header.config.get("data")
        day = data.get("date") if isinstance(data, dict) else None
    data = config.data.model_copy(update={"date": day})
    return config.model_copy(update={"data": data})


def config_of(
    header: Header,
    run_dir: Path,
    overrides: Sequence[str] = (),
    reading_keys: Collection[str] = (),
) -> RunConfig:
    """Return the configuration in a header, with `key=value` overrides. No module is imported.

    Args:
        header: of the run.
        run_dir: its directory, or the file with its journal.
        overrides: they may change what may differ when a run is resumed.
        reading_keys: they may change these, too, as they decide no weights.

    Raises:
        UserError: a value cannot be read, or an override may not change it.
    """
    recorded = {key: value for key, value in header.config.items() if key not in _INPUTS}
    where = f"run {run_dir}"
    values = {**recorded, "run_dir": str(run_dir)}
    # A refusal names both versions: an older one had keys and values that are gone.
    version = header.libraries.get("lezo_ds")
    if version != lezo_ds.__version__:
        where += f" (written by lezo_ds {version}; this is {lezo_ds.__version__})"
    config = config_from_dict(values, where, overrides)
    # No step follows. So the schedule, which may be in a module of anyone, decides nothing.
    constant = config.zo.model_copy(update={"lr_schedule": "constant"})
    replayed = config.model_copy(update={"zo": constant})
    may_differ = may_differ_on_resume(replayed).union(reading_keys)
    permitted = [each for each in overrides if each.partition("=")[0] in may_differ]
    unchanged = config_from_dict(values, where, permitted)
    for key, old, new in _differences(unchanged.model_dump(), config.model_dump()):
        raise UserError(
            f"{key} of {where} is {old} and cannot be {new}: a run keeps what it was trained with",
            fix=f"remove {key}=...",
        )
    return config


def refuse_code(
    values: Mapping[str, str | Mapping[str, float] | None], overrides: Sequence[str]
) -> None:
    """Refuse to import a module that only a run or an export names, and no override."""
    named = [override.partition("=")[0] for override in overrides]
    not_named = []
    for key, value in values.items():
        names = [value] if isinstance(value, str) else value or ()  # or a map of rewards
        if any(map(names_code, names)) and key not in named:
            not_named.append(f"{key}={value}")
    if not_named:
        raise UserError(
            f"{', '.join(not_named)} of the run is in a module, "
            "which is imported only if the command names it",
            fix=f"if you trust this module, add {' '.join(map(shlex.quote, not_named))}",
        )


def assert_same_run(recorded: Header, ours: Header, may_differ: Collection[str]) -> None:
    """Refuse to continue a run with other inputs. Warn of other libraries and processors.

    Args:
        recorded: the header of the run.
        ours: that of the command which would continue it.
        may_differ: dotted keys of the configuration that may have another value.

    Raises:
        UserError: the first input that differs, with both values.
    """
    _refuse_older_training(recorded, ours)
    for key, old, new in _differences(_inputs_of(recorded), _inputs_of(ours)):
        # A key that is younger than the run had its default.
        default = _SHORT.repr(default_of(key) if key in KEYS else None)
        had_default = old == _SHORT.repr("absent") and new == default
        if key in may_differ or had_default:
            continue
        written_by = ""
        version = recorded.libraries.get("lezo_ds")
        own_version = ours.libraries["lezo_ds"]
        if version != own_version:
            written_by = f", written by lezo_ds {version} (this is {own_version})"
        raise UserError(
            f"{key} differs from the journal's{written_by}: it is {new}, and was {old}",
            fix=f"{_inputs_to_add(key, recorded)}, or use another run_dir",
        )
    recorded_machine = recorded.libraries | recorded.arithmetic
    for key, old, new in _differences(recorded_machine, ours.libraries | ours.arithmetic):
        logger.warning("%s was %s when the journal was started and is %s now", key, old, new)


def _refuse_older_training(recorded: Header, ours: Header) -> None:
    """Refuse to continue a run of an older version that trained in another way."""
    version = str(recorded.libraries.get("lezo_ds"))
    own_version = ours.libraries["lezo_ds"]
    zo = recorded.config.get("zo")
    if not isinstance(zo, dict) or version == own_version:
        return
    change = ""
    if version == "0.5.0" and zo.get("estimator") == "fzoo" and zo.get("examples_per_direction"):
        change = "in zo.estimator=fzoo, groups of examples share one deviation since 0.6.0"
    if recorded.config.get("method") == "adamw" and version.startswith(_BEFORE_TRAINER):
        change = "method=adamw has checkpoints of transformers' Trainer since 0.6.0"
    if change:
        raise UserError(
            f"{change}, and the run was written by lezo_ds {version} (this is {own_version})",
            fix=f"resume the run with lezo_ds {version}, or use another run_dir",
        )


def _inputs_to_add(key: str, recorded: Header) -> str:
    """Return what a command adds to continue a run whose input `key` is not the command's."""
    if key.startswith("generation."):
        older = recorded.config["generation"]
        stop = shlex.quote(f"generation.stop={json.dumps(older['stop'])}")
        return f"add {stop} generation.max_new_tokens={older['max_new_tokens']}"
    if key == "train.steps":
        steps = recorded.config["train"]["steps"]
        schedule = recorded.config["zo"]["lr_schedule"]
        return f"add train.steps={steps}, since zo.lr_schedule={schedule} depends on the number"
    if key == "zo.probes_per_pass":
        return f"add {key}={recorded.config['zo']['probes_per_pass']}"
    data = recorded.config.get("data")
    if key.startswith("data_fingerprints") and isinstance(data, dict) and "splits" not in data:
        return "add data.splits=random, as the splits of this run were drawn"
    return "use the inputs that the run was started with"


def _inputs_of(header: Header) -> dict[str, Any]:
    """Return what decides the weights of a run, by the names that errors use."""
    return {
        "noise_version": header.noise_version,
        "model_fingerprint": header.model_fingerprint,
        "parameters": header.parameter_table_hash,
        **header.config,
    }


def assert_same_base(recorded: Header, base: BaseModel) -> None:
    """Refuse to continue a run on other base weights. `check_records` compares all other inputs."""
    ours = replace(
        recorded, model_fingerprint=base.fingerprint, parameter_table_hash=base.table_hash
    )
    assert_same_run(recorded, ours, ())


def assert_same_model_config(recorded: Header, model: str) -> None:
    """Refuse to restore the weights of a run into a base model with another config.json."""
    directory = resolve_model(model)
    # The recorded value need not be a dict: an exported journal may come from anyone.
    recorded_config = {"": recorded.config.get("model_config")}
    difference = next(_differences(recorded_config, {"": _model_config(directory)}), None)
    if difference is not None:
        key, old, new = difference
        raise UserError(
            f"{key[1:]} in {directory / 'config.json'} differs from the run's: "
            f"it is {new}, and was {old}",
            fix="add model.path=... with the directory of the base model",
        )


def _model_config(model: Path) -> dict[str, Any]:
    # JSON has no infinity, but Python writes and reads one. The journal keeps it as a string.
    values = json.loads((model / "config.json").read_text(), parse_constant=str)
    return {key: value for key, value in values.items() if key not in _UNIMPORTANT}


def _differences(
    left: Mapping[str, Any], right: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield the dotted key and both values, cut short, of each difference of two nested dicts."""
    for name in sorted(left.keys() | right.keys()):
        old = left.get(name, "absent")
        new = right.get(name, "absent")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", _SHORT.repr(old), _SHORT.repr(new)


# Records.


def steps_of(records: Iterable[JournalRecord]) -> list[StepRecord]:
    """Return the steps among the records of a journal."""
    return [record for record in records if isinstance(record, StepRecord)]


def evaluations_of(records: Iterable[JournalRecord]) -> list[EvaluationRecord]:
    """Return the evaluations among the records of a journal."""
    return [record for record in records if isinstance(record, EvaluationRecord)]


def owner_of(header: Header, step_checksums: Sequence[str] = ()) -> SnapshotOwner:
    """Return the owner of a run's snapshots.

    Args:
        header: the header of the run.
        step_checksums: those of its journal. Without a journal, as of AdamW, all snapshots have the
            checksum of the header.
    """
    return SnapshotOwner(header.model_fingerprint, step_checksums or (header_checksum(header),))


# Evaluations.


def best_evaluation(
    evaluations: Sequence[EvaluationRecord], first_step: int = 0
) -> EvaluationRecord | None:
    """Return the first evaluation with the lowest validation loss, or None if there is none.

    Only those after at least `first_step` steps count. Step 0 is the base model.
    """
    candidates = [
        evaluation
        for evaluation in evaluations
        if evaluation.split == "dev" and evaluation.step >= first_step
    ]
    return min(candidates, key=_loss, default=None)


def _loss(evaluation: EvaluationRecord) -> float:
    """Return the loss of an evaluation, and infinity if it was not finite."""
    return math.inf if evaluation.loss is None else evaluation.loss


def is_worse_than_base(evaluations: Sequence[EvaluationRecord]) -> bool:
    """Return whether no validation loss after a step was below that of the base model."""
    trained = best_evaluation(evaluations, first_step=1)
    return trained is not None and best_evaluation(evaluations) is not trained


def stopping_step(evaluations: Sequence[EvaluationRecord], patience: int | None) -> int | None:
    """Return the step at which a run loses its patience, or None.

    That is the first one with `patience` validations in a row which are not better than the best
    one before. The first validation after step 0 counts as better, because many runs are worse than
    the base model at first.
    """
    lowest = math.inf
    num_worse = 0
    for evaluation in evaluations:
        if evaluation.split != "dev" or evaluation.step == 0:
            continue
        if _loss(evaluation) < lowest:
            lowest = _loss(evaluation)
            num_worse = 0
        else:
            num_worse += 1
        if num_worse == patience:
            return evaluation.step
    return None


# First-order runs.


@dataclass(frozen=True)
class TrainingState:
    """The content of training_state.json: the records of AdamW.

    Attributes:
        header: the inputs of the run.
        world_size: number of ranks; the checkpoint has one shard of the optimizer states for each.
        step: number of steps that the checkpoint has seen; 0 if there is no checkpoint yet.
        evaluations: all of them, oldest first. Those after `step` are done again on resumption.
    """

    header: Header
    world_size: int
    step: int = 0
    evaluations: tuple[EvaluationRecord, ...] = ()

    @classmethod
    def read(cls, path: Path) -> TrainingState:
        """Return the content of a file. UserError: it is damaged."""
        try:
            return TypeAdapter(cls).validate_json(read_regular(path), strict=True)
        except (OSError, ValueError) as error:  # pydantic's error is a ValueError
            raise UserError(
                f"{path} cannot be read: {type(error).__name__}",
                fix="restore it from a copy, or use another run_dir",
            ) from error


# Recorded runs.


@dataclass(frozen=True)
class RunRecords:
    """The records of a run, or of an exported journal.

    Attributes:
        header: the inputs of the run.
        records: of the journal; of a first-order run, its evaluations.
        num_steps: number of steps; of a first-order run, up to its last checkpoint.
        owner: of the snapshots.
        num_ranks: number of ranks that must resume the run; None if any can.
    """

    header: Header
    records: Sequence[JournalRecord]
    num_steps: int
    owner: SnapshotOwner
    num_ranks: int | None = None

    @classmethod
    def of_journal(cls, path: Path) -> RunRecords:
        """Return the records of a journal."""
        header, records, step_checksums = read_journal(path)
        return cls(header, records, len(steps_of(records)), owner_of(header, step_checksums))


@dataclass(frozen=True, kw_only=True)
class RecordedRun(RunRecords):
    """A run as its directory has it, or an exported journal.

    Attributes:
        directory: of the run. That of an exported journal is the file: it has no snapshots.
        config: its configuration, with overrides applied.
        digests: of the weights, by the number of steps; a few of them, or none.
        overrides: those that were applied.
    """

    directory: RunDirectory
    config: RunConfig
    digests: Mapping[int, str]
    overrides: Sequence[str]

    def find_step(self, step: str) -> int:
        """Return the number of steps for "best" (lowest validation loss), "last" or a number.

        Raises:
            UserError: the run has no such step, or no weights after it.
        """
        run_dir = self.directory.path
        found = int(step) if step.isdecimal() else None
        if step == "last":
            found = self.num_steps
        if step == "best":
            evaluations = evaluations_of(self.records)
            best = best_evaluation(evaluations)
            if best is None or best_evaluation(evaluations, first_step=1) is None:
                raise UserError(
                    f"run {run_dir} has no evaluation after a step, so it has no best step",
                    fix="use --step last, or resume the run",
                )
            found = best.step
        available: Sequence[int] = range(self.num_steps + 1)
        expected = f"0 to {self.num_steps}"
        if found is None or found not in available:
            raise UserError(
                f"run {run_dir} has no step {step}", fix=f"set --step to best, last, or {expected}"
            )
        return found


def read_run(
    path: Path, overrides: Sequence[str] = (), reading_keys: Collection[str] = ()
) -> RecordedRun:
    """Read the directory of a run.

    `key=value` overrides change its configuration, such as the path of a model that has moved. For
    them and `reading_keys`, see `config_of`.

    Raises:
        UserError: it has no run, its records cannot be read, or an override may not be.
        JournalError: its journal is damaged.
    """
    directory = RunDirectory(path)
    recorded = _read_records(directory)
    if recorded is None:
        raise UserError(
            f"{path} is not the directory of a run: it has no journal.jsonl and no "
            "training_state.json",
            fix="use the run_dir that lezo-ds train printed",
        )
    # The digests of weights that the run has noted.
    own, _ = own_snapshots(directory.snapshots, recorded.owner)
    digests = {
        step: str(manifest["digest"]) for step, manifest in own.items() if "digest" in manifest
    }
    results = RunResults.read(directory.results)
    if results is not None:
        digests[results.step_of_weights] = results.weights_digest
    config = config_of(recorded.header, path, overrides, reading_keys)
    return RecordedRun(
        **vars(recorded), directory=directory, config=config, digests=digests, overrides=overrides
    )


def _read_records(directory: RunDirectory) -> RunRecords | None:
    """Return the records of a run, or None if the directory has none."""
    if directory.training_state.exists():
        state = TrainingState.read(directory.training_state)
        owner = owner_of(state.header)
        return RunRecords(state.header, state.evaluations, state.step, owner, state.world_size)
    if directory.journal.exists():
        return RunRecords.of_journal(directory.journal)
    return None


def check_records(
    config: RunConfig, data: TaskData, directory: RunDirectory, num_ranks: int
) -> None:
    """Refuse, before weights are loaded, to resume a run as another one.

    Raises:
        UserError: the inputs are not those of the run, it has more steps already, or AdamW's
            checkpoint has another number of ranks.
    """
    recorded = _read_records(directory)
    if recorded is None:
        return
    header = recorded.header
    ours = make_header(config, data, header.model_fingerprint, header.parameter_table_hash)
    assert_same_run(header, ours, may_differ_on_resume(config))
    num_done = recorded.num_steps
    if config.train.steps is not None and config.train.steps < num_done:
        raise UserError(
            f"run {directory.path} has {num_done} steps already; train.steps={config.train.steps}",
            fix=f"set train.steps={num_done} or more, or larger train.epochs, or another run_dir",
        )
    if num_done > 0 and recorded.num_ranks not in (None, num_ranks):
        raise UserError(
            f"the checkpoint of a first-order run has {recorded.num_ranks} ranks, not {num_ranks}",
            fix=f"start {recorded.num_ranks} ranks, or use another run_dir",
        )
