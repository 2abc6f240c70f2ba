"""Configurations that were recorded by earlier versions, in journals, packs and config.yaml."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lezo_ds
from lezo_ds.config.reading import flatten_sections
from lezo_ds.config.run_config import config_from_dict
from lezo_ds.config.schema import SCHEMA, RunConfig
from lezo_ds.errors import UserError


@dataclass(frozen=True)
class OldKey:
    """A key that earlier versions had.

    Attributes:
        new: the key that replaces it; None if the key was removed.
        values: today's value for each old value. A value that is not listed is kept if the key was renamed,
            and refused if the key was removed: what it asked for is gone.
    """

    new: str | None
    values: Mapping[Hashable, Any]


OLD_KEYS: Mapping[str, OldKey] = {
    "data.calibrated": OldKey(new="data.calibration", values={False: "none", True: "sfc"}),
    "zo.noise": OldKey(new=None, values={"exact": None}),
    "zo.forward": OldKey(new="zo.probes_per_pass", values={"dual": 2, "two_pass": 1}),
}
"""Every key that was renamed or removed, by its old name."""


def recorded_config(
    values: Mapping[str, Any], where: str, written_by: str | None, overrides: Sequence[str] = ()
) -> RunConfig:
    """Return a configuration that this or an earlier version recorded, in today's keys.

    Renamed keys are mapped, removed keys with a neutral value are dropped, and missing keys get their
    defaults.

    Args:
        values: sections and keys.
        where: the source of the values, for messages.
        written_by: the version of lezo_ds that recorded them; None if it is not known.
        overrides: `key=value` changes, with today's keys.

    Raises:
        UserError: a removed key with a value that this version cannot follow, or a key of a later version;
            or as `config_from_dict`.
    """
    found: dict[str, Any] = {}
    for name, value in flatten_sections(SCHEMA, values).items():
        old = OLD_KEYS.get(name)
        if old is None:
            if name not in SCHEMA.keys and name.rpartition(".")[0] not in SCHEMA.open_sections:
                raise _refusal(where, f"{name}={value}", written_by, "keys that this version knows")
            found[name] = value
        elif old.new is not None:
            found[old.new] = old.values.get(value, value)
        elif value not in old.values:
            neutral = " or ".join(f"{name}={neutral}" for neutral in old.values)
            raise _refusal(where, f"{name}={value}", written_by, neutral)
    return config_from_dict(found, where, overrides, recorded=True)


def _refusal(where: str, got: str, written_by: str | None, expected: str) -> UserError:
    version = f"lezo_ds {written_by}" if written_by else "another version of lezo_ds"
    return UserError(
        f"{where} was written by {version} and cannot be read by lezo_ds {lezo_ds.__version__}",
        got=got,
        expected=expected,
        fix=f"use {version if written_by else 'the version that wrote it'}",
    )
