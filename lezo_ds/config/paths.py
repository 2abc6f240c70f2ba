"""Paths in recipes and on command lines, and the shipped folders `launch` and `ds_configs`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lezo_ds.errors import UserError

DATA_KEYS = ("data.path", "data.train", "data.validation", "data.test")
PATH_KEYS = ("run_dir", "model.path", "peft.path", *DATA_KEYS, "deepspeed")
"""Keys whose value may be a path. Some values are names, such as an id on the hub."""

_PACKAGE = Path(__file__).parents[1]
ROOT = _PACKAGE if (_PACKAGE / "ds_configs").is_dir() else _PACKAGE.parent
"""The folder of `launch` and `ds_configs`: the package in a wheel (see setup.py), or the clone."""


def find_file(name: str) -> Path:
    """Return a path from the working directory, or of a shipped file if nothing is there."""
    if not Path(name).exists() and (ROOT / name).exists():
        return ROOT / name
    return Path(name)


def shipped_files(pattern: str) -> dict[str, Path]:
    """Return the shipped files of a pattern, such as ds_configs/*.json, by their names."""
    return {path.stem: path for path in sorted(ROOT.glob(pattern))}


def split_revision(model: str) -> tuple[str, str | None]:
    """Return the id and the revision of OWNER/NAME@REVISION on the hub. A directory has none."""
    if Path(model).exists():
        return model, None
    name, _, revision = model.partition("@")
    return name, revision or None


def public_name(path: str | None) -> str | None:
    """Return a name on the hub as it is, and of a path its last part, which tells no folder."""
    if path is None:
        return None
    if Path(path).exists() or path.startswith(("/", "~", ".")):
        return Path(path).name
    return path


def expand(path: str, where: str) -> str:
    """Return a path with the values of `~` and `$VAR`. `where` names its source in messages.

    Raises:
        UserError: A variable is not set.
    """
    expanded = os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111 (it may be no path)
    if re.search(r"\$\w|\$\{", expanded):
        raise UserError(
            f"{where}={path} names an environment variable that is not set", fix="export it"
        )
    return expanded


def resolve_paths(values: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return values by dotted key with the paths that they mean.

    A path is relative to the folder of its recipe if it begins with ./ or ../ or exists there. All
    other paths are relative to the working directory. That a run_dir exists there does not count.

    Args:
        values: Values of a configuration, by dotted key.
        folder: The recipe's folder; None for values from the command line, whose paths are all
            relative to the working directory.
    """
    base = (folder or Path()).absolute()
    resolved = dict(values)
    for key in PATH_KEYS:
        if not isinstance(resolved.get(key), str):
            continue
        path = expand(resolved[key], key)
        is_relative = path in (".", "..") or path.startswith(("./", "../"))
        may_be_near = folder is not None and key != "run_dir" and path != ""
        if is_relative or (may_be_near and (base / path).exists()):
            path = os.path.normpath(base / path)
        resolved[key] = path
    return resolved
