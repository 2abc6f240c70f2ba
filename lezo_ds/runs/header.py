"""The header of a run's records: what its steps were made from, and which runs can continue them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lezo_ds.config import RunConfig, config_to_dict, flatten
from lezo_ds.config.compatibility import recorded_config
from lezo_ds.errors import UserError
from lezo_ds.journal import Header
from lezo_ds.noise import NOISE_VERSION
from lezo_ds.runs.run_directory import library_versions
from lezo_ds.sharding.checkpoint_files import resolve_model

logger = logging.getLogger(__name__)


def make_header(config: RunConfig, fingerprint: str, parameter_table: str) -> Header:
    """Return the header of a run.

    Args:
        config: configuration of the run. Everything except run_dir is recorded.
        fingerprint: digest of the base model.
        parameter_table: digest of the names, ids and shapes of the parameters.
    """
    return Header(
        noise_version=NOISE_VERSION,
        model_fingerprint=fingerprint,
        parameter_table_hash=parameter_table,
        config=_recorded(config, _tokenizer_hash(config.model.path)),
        libraries=library_versions(),
    )


def config_of(header: Header, run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration in a header, with the keys of this version.

    Args:
        header: header that this version or an earlier one wrote.
        run_dir: present directory of the run.
        overrides: `key=value` changes.

    Raises:
        UserError: this version cannot read the configuration; see `recorded_config`.
    """
    values = {key: value for key, value in header.config.items() if key != "tokenizer"}
    values["run_dir"] = str(run_dir)
    written_by = header.libraries.get("lezo_ds")
    return recorded_config(values, f"run {run_dir}", written_by, overrides=overrides)


def assert_same_run(recorded: Header, ours: Header, run_dir: Path, may_differ: Collection[str]) -> None:
    """Refuse to continue a run with another model, noise or configuration than it was started with.

    Other library versions only cause a warning.

    Args:
        recorded: header of the run, which this version or an earlier one wrote.
        ours: header that this process would write.
        run_dir: directory of the run.
        may_differ: dotted configuration keys that may differ.

    Raises:
        UserError: the first item that differs, with both values, and both versions if they differ.
    """
    config = _recorded(config_of(recorded, run_dir), recorded.config.get("tokenizer"))
    recorded = replace(recorded, config=config)  # with JSON's types
    facts = {
        "noise version": (recorded.noise_version, ours.noise_version),
        "model fingerprint": (recorded.model_fingerprint, ours.model_fingerprint),
        "parameter table": (recorded.parameter_table_hash, ours.parameter_table_hash),
    }
    found = [(f"the {name}", repr(old), repr(new)) for name, (old, new) in facts.items() if old != new]
    found += [
        (f"config {key}", old, new)
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
    for key, old, new in _differences(recorded.libraries, ours.libraries):
        logger.warning("%s was %s when the journal was started and is %s now", key, old, new)


def header_without_weights(recorded: Header, config: RunConfig) -> Header:
    """Return the header of a run whose weights are not loaded yet.

    The two hashes that need the weights come from the record. They are compared once the weights are loaded.
    """
    return make_header(config, recorded.model_fingerprint, recorded.parameter_table_hash)


def _recorded(config: RunConfig, tokenizer: str | None) -> dict[str, Any]:
    values = {key: value for key, value in config_to_dict(config).items() if key != "run_dir"}
    return {**values, "tokenizer": tokenizer}


def _tokenizer_hash(model: str) -> str:
    digest = hashlib.sha256()
    for file in sorted(resolve_model(model).iterdir()):
        if file.name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:32]


def _differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the dotted key and both values, as text, of each item that differs between two nested dicts."""
    old, new = flatten(left), flatten(right)

    def text(side: Mapping[str, Any], key: str) -> str:
        return repr(side[key]) if key in side else "absent"

    pairs = ((key, text(old, key), text(new, key)) for key in sorted(old.keys() | new.keys()))
    return [(key, before, now) for key, before, now in pairs if before != now]
