"""What a run records, which runs can continue it, and what follows from its evaluations.

The header of a journal has all inputs of a run: the configuration, and hashes of the base weights,
the tokenizer, the data and the code of modules that the recipe names. Who resumes a run builds the
header anew and compares it with the recorded one. `read_run` reads a run for commands that use it
and do not continue it.

A run is read by the release that wrote it, and by no other one.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import TYPE_CHECKING, Any

from lezo_ds import __version__, distributed
from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.checkpoints.sharded_model import BaseModel
from lezo_ds.checkpoints.snapshots import SnapshotOwner, own_snapshots
from lezo_ds.config import RunConfig, config_from_dict, keys_with, may_differ_on_resume
from lezo_ds.config.deepspeed import tensor_parallel_of
from lezo_ds.config.load import key_of
from lezo_ds.errors import UserError
from lezo_ds.files import sha256_file
from lezo_ds.forward.adapters import start_of
from lezo_ds.journal import (
    EvaluationRecord,
    Header,
    Journal,
    JournalContents,
    JournalRecord,
    read_journal,
)
from lezo_ds.noise import NOISE_VERSION
from lezo_ds.registry import file_of, names_code
from lezo_ds.runs.directory import RunDirectory, library_versions
from lezo_ds.runs.evaluations import best_evaluation, evaluations_of
from lezo_ds.runs.results import RunResults
from lezo_ds.zo.records import StepRecord

if TYPE_CHECKING:  # `export` starts without the libraries of data
    from lezo_ds.data.task_data import TaskData

logger = logging.getLogger(__name__)

_INPUTS = (
    "tokenizer",
    "adapter",
    "model_config",
    "data_fingerprints",
    "end_ids",
    "code",
    "digests",
)
"""Entries of a header's configuration that are no keys. Only an exported journal has digests."""

CODE_KEYS = (
    ("data", "task"),
    ("data", "metric"),
    ("train", "objective"),
    ("zo", "estimator"),
    ("zo", "law"),
    ("zo", "layer_policy"),
    ("zo", "lr_schedule"),
)
"""Keys that may name a module."""

_SHORT = Repr()  # of a value that may be long, or deep
_SHORT.maxstring = 100

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")
_UNIMPORTANT = ("_name_or_path", "transformers_version")
"""Keys of a model's config.json that change if the model is only copied or saved again."""
_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
"""Keys of a model's config.json in which another model differs first."""


# Headers.


def make_header(
    config: RunConfig, data: TaskData | None, fingerprint: str, parameter_table: str
) -> Header:
    """Return the header of a run.

    Args:
        config: of the run.
        data: its encoded splits; None for a training loop that reads data of its own.
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
    inputs["data_fingerprints"] = {}
    if data is not None:
        inputs["data_fingerprints"] = {
            "train": data.train.fingerprint(),
            "dev": data.dev.fingerprint(),
            "test": data.test.fingerprint(),
        }
        if data.reader.generation is not None:  # of generation_config.json
            inputs["end_ids"] = list(data.reader.tokenizer.end_ids)
    inputs["code"] = code_of(inputs)
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


def code_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of the file of each module that nested values of a recipe name, by name.

    What a module imports is not part of it.
    """
    names: set[str] = set()
    for section, key in CODE_KEYS:
        value = values[section][key] or ()
        names.update([value] if isinstance(value, str) else value)  # or a map of rewards
    return {name: sha256_file(file_of(name)) for name in sorted(names) if names_code(name)}


def with_start_date(config: RunConfig) -> RunConfig:
    """Return the configuration of a run to start or to resume, with the day on which it started.

    Chat templates may write the day, and a run goes on with the texts that it started with.
    """
    if not config.data.in_chat or config.data.date is not None:
        return config
    journal = RunDirectory(config.run_dir).journal
    day = datetime.date.today().isoformat()
    if journal.exists():
        day = read_own_journal(journal).header.config["data"]["date"]
    return config.with_section("data", date=day)


def refuse_other_release(header: Header, where: Path) -> None:
    """Refuse to read a run that another release has written."""
    version = str(header.libraries.get("lezo_ds"))
    if version.split(".")[:2] != __version__.split(".")[:2]:
        raise UserError(
            f"{where} was written by lezo_ds {version}, and this is {__version__}",
            fix=f"pip install lezo_ds=={version}, or train again",
        )


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
    values = {**recorded, "run_dir": str(run_dir)}
    where = f"run {run_dir}"
    config = config_from_dict(values, where, overrides)
    # No step follows. So the number of steps, on which a schedule may depend, decides nothing.
    may_differ = keys_with("may_differ_on_resume").union(reading_keys)
    permitted = [each for each in overrides if key_of(each) in may_differ]
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
            shown = value if isinstance(value, str) else json.dumps(value)
            not_named.append(f"{key}={shown}")
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
    for key, old, new in _differences(_inputs_of(recorded), _inputs_of(ours)):
        if key in may_differ:
            continue
        fix = "use the inputs that the run was started with"
        if key.startswith("code."):
            fix = "restore the file"
        elif key == "train.steps":
            # The number that differs may follow from train.epochs, and both cannot be set.
            instead = " and train.epochs=null" if ours.config["train"]["epochs"] else ""
            fix = f"set train.steps={old}{instead}, on which zo.lr_schedule depends"
        raise UserError(
            f"{key} differs from the journal's: it is {new}, and was {old}",
            fix=f"{fix}, or use another run_dir",
        )
    recorded_machine = recorded.libraries | recorded.arithmetic
    for key, old, new in _differences(recorded_machine, ours.libraries | ours.arithmetic):
        logger.warning("%s was %s when the journal was started and is %s now", key, old, new)


def _inputs_of(header: Header) -> dict[str, Any]:
    """Return what decides the weights of a run, by the names that errors use."""
    return {
        **header.config,
        "noise_version": header.noise_version,
        "model_fingerprint": header.model_fingerprint,
        "parameters": header.parameter_table_hash,
    }


def assert_same_base(recorded: Header, base: BaseModel) -> None:
    """Refuse other base weights than those of a run."""
    facts = (base.fingerprint, base.table_hash)
    if facts != (recorded.model_fingerprint, recorded.parameter_table_hash):
        raise UserError(
            f"{base.name} is not the base model of the run: its fingerprint or the "
            "hash of its parameters' names differs",
            fix="add model.path=... with the directory of the base model",
        )


def open_journal(
    directory: RunDirectory,
    config: RunConfig,
    data: TaskData | None,
    base: BaseModel,
) -> Journal:
    """Open the journal of a run, or start one if it has none. For rank 0.

    Args:
        directory: of the run.
        config: of the run.
        data: see `make_header`.
        base: the model that was loaded.

    Raises:
        UserError: the run has another base model.
        JournalError: the journal is damaged, or cannot be written.
    """
    if directory.journal.exists():
        journal = Journal.open(directory.journal)
        assert_same_base(journal.header, base)
        return journal
    header = make_header(config, data, base.fingerprint, base.table_hash)
    return Journal.create(directory.journal, header)


def assert_same_model_config(recorded: Header, model: str) -> None:
    """Refuse to restore the weights of a run into a base model with another config.json."""
    directory = resolve_model(model)
    # The recorded value need not be a dict: an exported journal may come from anyone.
    recorded_config = {"": recorded.config.get("model_config")}
    found = list(_differences(recorded_config, {"": _model_config(directory)}))
    if found:
        key, old, new = min(found, key=lambda each: each[0].rpartition(".")[2] not in _SIZES)
        raise UserError(
            f"{directory} is another model: {key[1:]} is {new}, and the run's is {old}",
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


def owner_of(journal: Journal | JournalContents) -> SnapshotOwner:
    """Return what the snapshots of a run have in their manifests."""
    return SnapshotOwner(journal.header.model_fingerprint, journal.step_checksums)


# Recorded runs.


def read_own_journal(path: Path) -> JournalContents:
    """Return the content of a journal. UserError: another release wrote it."""
    contents = read_journal(path)
    refuse_other_release(contents.header, path)
    return contents


@dataclass(frozen=True)
class RecordedRun:
    """A run as its directory has it, or an exported journal.

    Attributes:
        journal: its header and its records.
        directory: of the run. That of an exported journal is the file: it has no snapshots.
        config: its configuration, with overrides applied.
        digests: of the weights, by the number of steps; a few of them, or none.
        overrides: those that were applied.
    """

    journal: JournalContents
    directory: RunDirectory
    config: RunConfig
    digests: Mapping[int, str]
    overrides: Sequence[str]

    @property
    def header(self) -> Header:
        """The inputs of the run."""
        return self.journal.header

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        """Those of the journal, oldest first."""
        return evaluations_of(self.journal.records)

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(steps_of(self.journal.records))

    def find_step(self, step: str) -> int:
        """Return the number of steps for "best" (lowest validation loss), "last" or a number.

        Raises:
            UserError: the run has no such step.
        """
        run_dir = self.directory.path
        found = int(step) if step.isdecimal() else -1
        if step == "last":
            found = self.num_steps
        if step == "best":
            best = best_evaluation(self.evaluations)
            if best is None or best_evaluation(self.evaluations, first_step=1) is None:
                raise UserError(
                    f"run {run_dir} has no evaluation after a step, so it has no best step",
                    fix="use --step last, or resume the run",
                )
            found = best.step
            logger.info("step %d has the lowest validation loss", found)
            if found == 0:
                logger.warning(
                    "the best step of %s is 0, the base model: no step has a lower validation loss",
                    run_dir,
                )
        if not 0 <= found <= self.num_steps:
            raise UserError(
                f"run {run_dir} has no step {step}",
                fix=f"set --step to best, last, or 0 to {self.num_steps}",
            )
        return found


def read_run(
    path: Path, overrides: Sequence[str] = (), reading_keys: Collection[str] = ()
) -> RecordedRun:
    """Read the directory of a run.

    `key=value` overrides change its configuration, such as the path of a model that has moved. For
    them and `reading_keys`, see `config_of`.

    Raises:
        UserError: it has no run, another release wrote it, or an override may not be.
        JournalError: its journal is damaged.
    """
    directory = RunDirectory(path)
    if not directory.journal.exists():
        raise UserError(
            f"{path} is not the directory of a run: it has no journal.jsonl",
            fix="use the run_dir that lezo-ds train printed",
        )
    journal = read_own_journal(directory.journal)
    # The digests of weights that the run has noted.
    own, _ = own_snapshots(directory.snapshots, owner_of(journal))
    digests = {
        step: str(manifest["digest"]) for step, manifest in own.items() if "digest" in manifest
    }
    results = RunResults.read(directory.results)
    if results is not None:
        digests[results.step_of_weights] = results.weights_digest
    config = config_of(journal.header, path, overrides, reading_keys)
    return RecordedRun(journal, directory, config, digests, overrides)


def check_records(config: RunConfig, data: TaskData | None, directory: RunDirectory) -> None:
    """Refuse, before weights are loaded, to resume a run as another one.

    Raises:
        UserError: the inputs are not those of the run, or it has more steps already.
    """
    if not directory.journal.exists():
        return
    header, entries, _ = read_own_journal(directory.journal)
    ours = make_header(config, data, header.model_fingerprint, header.parameter_table_hash)
    assert_same_run(header, ours, may_differ_on_resume(config))
    num_done = len(steps_of(entries))
    if config.train.steps is not None and config.train.steps < num_done:
        raise UserError(
            f"run {directory.path} has {num_done} steps already; train.steps={config.train.steps}",
            fix=f"set train.steps={num_done} or more, or larger train.epochs, or another run_dir",
        )
