"""Paths in recipes and on command lines, and the shipped folders `launch` and `ds_configs`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lezo_ds.errors import UserError

_PACKAGE = Path(__file__).parents[1]
ROOT = _PACKAGE if (_PACKAGE / "ds_configs").is_dir() else _PACKAGE.parent
"""The folder of `launch` and `ds_configs`: the package in a wheel (see setup.py), or the clone."""


def find_file(name: str) -> Path:
    """Return a path from the working directory, or of a shipped file if nothing is there."""
    path = Path(name)
    shipped = ROOT / name
    if not path.exists() and shipped.exists():  # an error names the path of the user
        return shipped
    return path


def shipped_files(pattern: str) -> dict[str, Path]:
    """Return the shipped files of a pattern, such as ds_configs/*.json, by their names."""
    paths = sorted(ROOT.glob(pattern))
    return {path.stem: path for path in paths}


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
    local = Path(path)
    if local.exists() or path.startswith(("/", "~", ".")):
        return local.name
    return path


def expand(path: str, where: str) -> str:
    """Return a path with the values of `~` and `$VAR`. `where` names its source in messages.

    Raises:
        UserError: A variable is not set.
    """
    expanded = os.path.expanduser(os.path.expandvars(path))  # noqa: PTH111 (it may be no path)
    if re.search(r"\$\w|\$\{", expanded):
        raise UserError(
            f"{where}={path} names an environment variable that is not set",
            fix="export it",
        )
    return expanded


def resolve_path(path: str, key: str, folder: Path | None, *, may_be_near: bool) -> str:
    """Return the path that the value of a key means. It may also be a name, as on the Hub.

    A path is relative to the folder of its recipe if it begins with ./ or ../ or exists there. All
    other paths are relative to the working directory.

    Args:
        path: The value.
        key: The key, for messages.
        folder: The recipe's folder; None for a value from the command line, which is relative to
            the working directory.
        may_be_near: Whether a path in the recipe's folder counts if it exists.
    """
    path = expand(path, key)
    base = (folder or Path()).absolute()
    full = base / path
    first, _, _ = path.partition("/")
    if first in (".", ".."):
        return os.path.normpath(full)
    if folder is None or path == "":
        return path
    if may_be_near and full.exists():
        return os.path.normpath(full)
    return path
