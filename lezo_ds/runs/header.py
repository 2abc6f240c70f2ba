"""The header of a run's records: what its steps were made from, and whether they can be continued."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lezo_ds import distributed
from lezo_ds.config import RunConfig, config_to_dict
from lezo_ds.config.compatibility import recorded_config
from lezo_ds.journal import Header, assert_compatible
from lezo_ds.noise import noise_version
from lezo_ds.runs.run_directory import library_versions
from lezo_ds.sharding.checkpoint_files import resolve_model


def make_header(config: RunConfig, fingerprint: str, parameter_table: str) -> Header:
    """Return the header of a run.

    Args:
        config: the run's configuration; all of it is recorded except run_dir.
        fingerprint: digest of the base model.
        parameter_table: digest of the parameters' names, ids and shapes.
    """
    return Header(
        noise_version=noise_version(distributed.device()),
        model_fingerprint=fingerprint,
        parameter_table_hash=parameter_table,
        config=_recorded(config, _tokenizer_hash(config.model.path)),
        libraries=library_versions(),
    )


def config_of(header: Header, run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration that a header holds, in today's keys.

    Args:
        header: of this or an earlier version.
        run_dir: directory of the run now.
        overrides: `key=value` changes.

    Raises:
        UserError: this version cannot read it; see `recorded_config`.
    """
    values = {key: value for key, value in header.config.items() if key != "tokenizer"}
    values["run_dir"] = str(run_dir)
    return recorded_config(values, f"run {run_dir}", header.libraries.get("lezo_ds"), overrides)


def assert_same_run(recorded: Header, ours: Header, run_dir: Path, may_differ: Collection[str]) -> None:
    """Refuse to continue a run with another model, noise or configuration than it was begun with.

    Args:
        recorded: the run's header, of this or an earlier version.
        ours: what this process would record.
        run_dir: directory of the run.
        may_differ: dotted configuration keys that may differ.

    Raises:
        UserError: naming the first item that differs, both values, and both versions if they differ.
    """
    config = _recorded(config_of(recorded, run_dir), recorded.config.get("tokenizer"))
    assert_compatible(replace(recorded, config=config), ours, may_differ)


def _recorded(config: RunConfig, tokenizer: str | None) -> dict[str, Any]:
    values = {key: value for key, value in config_to_dict(config).items() if key != "run_dir"}
    return {**values, "tokenizer": tokenizer}


def _tokenizer_hash(model: str) -> str:
    digest = hashlib.sha256()
    for file in sorted(resolve_model(model).iterdir()):
        if file.name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:32]
