"""The header of a run's records: what its steps were made from, and which runs can continue them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lezo_ds import distributed
from lezo_ds.config import RunConfig, config_from_dict, config_to_dict, flatten
from lezo_ds.data.packing import DEALING
from lezo_ds.data.task_data import TaskData
from lezo_ds.errors import UserError
from lezo_ds.forward.perturbed_norm import norm_facts
from lezo_ds.journal import Header, JournalRecord, step_checksums
from lezo_ds.model.snapshots import SnapshotOwner
from lezo_ds.noise import NOISE_VERSION
from lezo_ds.runs.run_directory import library_versions
from lezo_ds.sharding.checkpoint_files import resolve_model

logger = logging.getLogger(__name__)


_INPUTS = ("tokenizer", "model_config", "data_fingerprints")
"""Entries of a header's configuration that are not keys: what the run read from files."""

_UNIMPORTANT = ("_name_or_path", "transformers_version")
"""Keys of a model's config.json that change if the model is only copied or saved again."""


def make_header(config: RunConfig, data: TaskData, fingerprint: str, parameter_table: str) -> Header:
    """Return the header of a run.

    Args:
        config: configuration of the run. Everything except run_dir is recorded.
        data: data of the run. A fingerprint of each split is recorded.
        fingerprint: digest of the base model.
        parameter_table: digest of the names, ids and shapes of the parameters.
    """
    model = resolve_model(config.model.path)
    device = distributed.device()
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
        config={**_recorded_keys(config), **inputs},
        libraries=library_versions(),
        arithmetic={
            **distributed.arithmetic_facts(device),
            **norm_facts(device),
            **data.layout_facts(config),
        },
    )


def config_of(header: Header, run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration in a header, with the keys of this version.

    Args:
        header: header that this version or an earlier one wrote.
        run_dir: present directory of the run.
        overrides: `key=value` changes.

    Raises:
        UserError: this version cannot read the configuration; see `config_from_dict`.
    """
    values = {key: value for key, value in header.config.items() if key not in _INPUTS}
    values["run_dir"] = str(run_dir)
    return config_from_dict(values, f"run {run_dir}", overrides, recorded=True)


def assert_same_run(recorded: Header, ours: Header, run_dir: Path, may_differ: Collection[str]) -> None:
    """Refuse to continue a run with another model, noise, data or configuration than it was started with.

    Other library versions and another processor only cause a warning. So does an input that an earlier
    version did not record.

    Args:
        recorded: header of the run, which this version or an earlier one wrote.
        ours: header that this process would write.
        run_dir: directory of the run.
        may_differ: dotted configuration keys that may differ.

    Raises:
        UserError: the first item that differs, with both values, and both versions if they differ.
    """
    recorded = _in_todays_keys(recorded, run_dir, ours)
    facts = {
        "noise version": (recorded.noise_version, ours.noise_version),
        "model fingerprint": (recorded.model_fingerprint, ours.model_fingerprint),
        "parameter table": (recorded.parameter_table_hash, ours.parameter_table_hash),
    }
    found = [(f"the {name}", repr(old), repr(new)) for name, (old, new) in facts.items() if old != new]
    found += [
        (_described(key, ours), old, new)
        for key, old, new in _differences(recorded.config, ours.config)
        if key not in may_differ
    ]
    if found:
        name, old, new = found[0]
        version, own_version = recorded.libraries.get("lezo_ds"), ours.libraries["lezo_ds"]
        by = "" if version == own_version else f" (written by lezo_ds {version}, this is {own_version})"
        raise UserError(
            f"{name} differs from the journal's{by}",
            got=new,
            expected=old,
            fix="use the inputs that the journal was started with, or another run directory",
        )
    changed = _differences(recorded.libraries, ours.libraries)
    # Version 0.1.0 recorded no arithmetic, but it is known not to have dealt examples.
    arithmetic = recorded.arithmetic or {k: v for k, v in ours.arithmetic.items() if k not in DEALING}
    changed += _differences(arithmetic, ours.arithmetic)
    for key, old, new in changed:
        logger.warning("%s was %s when the journal was started and is %s now", key, old, new)


def header_without_weights(recorded: Header, config: RunConfig, data: TaskData) -> Header:
    """Return the header of a run whose weights are not loaded yet.

    The two hashes that need the weights come from the record. They are compared once the weights are loaded.
    """
    return make_header(config, data, recorded.model_fingerprint, recorded.parameter_table_hash)


def assert_same_model_config(recorded: Header, model: str) -> None:
    """Refuse to restore the weights of a run into a model with another config.json.

    Args:
        recorded: header of the run.
        model: hub id or directory of the base model.

    Raises:
        UserError: the first key that differs, with both values.
    """
    directory = resolve_model(model)
    ours = _model_config(directory)
    old = recorded.config.get("model_config")
    if old is None:
        logger.warning("%s", _unchecked(recorded, "model_config"))
        return
    for key, before, now in _differences(old, ours):
        raise UserError(
            f"{key} in {directory / 'config.json'} differs from the run's",
            got=now,
            expected=before,
            fix="add model.path=... with the directory of the base model",
        )


def journal_owner(header: Header, records: Iterable[JournalRecord]) -> SnapshotOwner:
    """Return what the manifests of a run's snapshots must have, after the records so far."""
    return SnapshotOwner(base=header.model_fingerprint, checksums=step_checksums(header, records))


def _recorded_keys(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in config_to_dict(config).items() if key != "run_dir"}


def _in_todays_keys(recorded: Header, run_dir: Path, ours: Header) -> Header:
    """Return the header of a run with the keys of this version, and our inputs if it lacks its own."""
    inputs = {}
    for name in ours.config.keys() & set(_INPUTS):
        if name not in recorded.config:
            logger.warning("%s", _unchecked(recorded, name))
        inputs[name] = recorded.config.get(name, ours.config[name])
    return replace(recorded, config={**_recorded_keys(config_of(recorded, run_dir)), **inputs})


def _unchecked(recorded: Header, name: str) -> str:
    version = recorded.libraries.get("lezo_ds")
    what = {"model_config": "the model's config.json", "data_fingerprints": "the data"}.get(name, name)
    return f"whether {what} has changed is unchecked, because lezo_ds {version} did not record it"


def _described(key: str, ours: Header) -> str:
    """Return the words for an entry of a header's configuration."""
    section, _, rest = key.partition(".")
    if section == "model_config":
        return f"{rest} in {ours.config['model']['path']}/config.json"
    if section == "data_fingerprints":
        data = ours.config["data"]
        place = data["train"] or data["path"] or "the hub"
        return f"the fingerprint of the {rest} split of {data['task']} in {place}"
    return f"config {key}"


def _model_config(model: Path) -> dict[str, Any]:
    # JSON has no infinity, but Python writes and reads one. The journal keeps it as text.
    values = json.loads((model / "config.json").read_text(), parse_constant=str)
    return {key: value for key, value in values.items() if key not in _UNIMPORTANT}


def _tokenizer_hash(model: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(model.iterdir()):
        if file.name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def _differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the dotted key and both values, as text, of each item that differs between two nested dicts."""
    old, new = flatten(left), flatten(right)

    def text(side: Mapping[str, Any], key: str) -> str:
        return repr(side[key]) if key in side else "absent"

    return [
        (key, text(old, key), text(new, key))
        for key in sorted(old.keys() | new.keys())
        if key not in old or key not in new or old[key] != new[key]
    ]
