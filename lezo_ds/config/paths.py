"""Paths in recipes and on command lines, and the files that are shipped: `launch` and `ds_configs`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lezo_ds.errors import UserError

DATA_KEYS = ("data.path", "data.train", "data.validation", "data.test")
PATH_KEYS = ("run_dir", "model.path", *DATA_KEYS, "deepspeed")

_PACKAGE = Path(__file__).parents[1]
ROOT = _PACKAGE if (_PACKAGE / "ds_configs").is_dir() else _PACKAGE.parent
"""Folder of `launch` and `ds_configs`: the package in a wheel (see setup.py), or the root of the clone."""


def find_file(name: str) -> Path:
    """Return a path from the working directory, or of a shipped file if nothing is there."""
    return ROOT / name if not Path(name).exists() and (ROOT / name).exists() else Path(name)


def expand(path: str, where: str) -> str:
    """Return a path with the values of `~` and `$VAR`. UserError: a variable is not set."""
    expanded = os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111 (it may be no path)
    if re.search(r"\$\w|\$\{", expanded):
        raise UserError(
            f"{where}={path} names an environment variable that is not set", fix="export it"
        )
    return expanded


def resolve_paths(values: Mapping[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return values by dotted key, with paths as lezo-ds train --help describes.

    `folder` is that of the recipe; None is the working directory, for values from the command line.
    """
    base = (folder or Path()).absolute()
    resolved = dict(values)
    for key in PATH_KEYS:
        if isinstance(resolved.get(key), str):
            path = expand(resolved[key], key)
            is_there = folder is not None and key != "run_dir" and path and (base / path).exists()
            if path.startswith(("./", "../")) or path in (".", "..") or is_there:
                path = os.path.normpath(base / path)
            resolved[key] = path
    return resolved
