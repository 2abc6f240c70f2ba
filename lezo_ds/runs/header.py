"""The header of a run's records: what its steps were computed from, and which runs can continue them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lezo_ds import distributed
from lezo_ds.config import RunConfig, config_from_dict, config_to_dict, flatten
from lezo_ds.data.task_data import TaskData
from lezo_ds.errors import UserError
from lezo_ds.forward.module_calls import norm_facts
from lezo_ds.journal import Header
from lezo_ds.model.checkpoint import resolve_model
from lezo_ds.noise import NOISE_VERSION
from lezo_ds.runs.directory import library_versions

logger = logging.getLogger(__name__)

_INPUTS = ("tokenizer", "model_config", "data_fingerprints", "digests")
"""Entries of a header's configuration that are not keys: what the run read from files, and the digests of its
weights by step, which only an exported journal has."""

_UNIMPORTANT = ("_name_or_path", "transformers_version")
"""Keys of a model's config.json that change if the model is only copied or saved again."""


def make_header(config: RunConfig, data: TaskData, fingerprint: str, parameter_table: str) -> Header:
    """Return the header of a run: its configuration but for run_dir, and hashes of its inputs.

    `fingerprint` is of the base weights, `parameter_table` of the names, ids and shapes of the parameters.
    """
    model = resolve_model(config.model.path)
    device = distributed.device()
    keys = {key: value for key, value in config_to_dict(config).items() if key != "run_dir"}
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
        arithmetic={**distributed.arithmetic_facts(device), **norm_facts(device)},
    )


def config_of(header: Header, run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration in a header, with `key=value` overrides. No module is imported."""
    values = {key: value for key, value in header.config.items() if key not in _INPUTS}
    return config_from_dict(values | {"run_dir": str(run_dir)}, f"run {run_dir}", overrides, recorded=True)


def assert_same_run(recorded: Header, ours: Header, may_differ: Collection[str]) -> None:
    """Refuse to continue a run with other inputs than it was started with, but for keys that may differ.

    Other library versions and another processor only cause a warning.
    """
    for key, old, new in _differences(_facts(recorded), _facts(ours)):
        if key not in may_differ:
            version, own_version = recorded.libraries.get("lezo_ds"), ours.libraries["lezo_ds"]
            by = "" if version == own_version else f", written by lezo_ds {version} (this is {own_version})"
            raise UserError(
                f"{key} differs from the journal's{by}: it is {new}, and was {old}",
                fix="use the inputs that the run was started with, or another run_dir",
            )
    for key, old, new in _differences(
        recorded.libraries | recorded.arithmetic, ours.libraries | ours.arithmetic
    ):
        logger.warning("%s was %s when the journal was started and is %s now", key, old, new)


def assert_same_model_config(recorded: Header, model: str) -> None:
    """Refuse to restore the weights of a run into a base model with another config.json."""
    directory = resolve_model(model)
    for key, old, new in _differences(recorded.config["model_config"], _model_config(directory)):
        raise UserError(
            f"{key} in {directory / 'config.json'} differs from the run's: it is {new}, and was {old}",
            fix="add model.path=... with the directory of the base model",
        )


def _facts(header: Header) -> dict[str, Any]:
    hashes = {"model_fingerprint": header.model_fingerprint, "parameters": header.parameter_table_hash}
    return {"noise_version": header.noise_version, **hashes, **header.config}


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
