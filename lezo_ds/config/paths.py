"""Paths in recipes and on command lines: the folder they are taken from, and what `~` and `$VAR` mean."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lezo_ds.errors import UserError

DATA_KEYS = ("data.path", "data.train", "data.validation", "data.test")
"""Config keys that may hold a path of the data."""

PATH_KEYS = ("run_dir", "model.path", *DATA_KEYS, "deepspeed")
"""Config keys that may hold a path of this machine."""

_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|(\w+))", re.ASCII)


def expand(path: str, where: str) -> str:
    """Return a path with the values of `~`, `~USER`, `$VAR` and `${VAR}`.

    Args:
        path: a path, or a name that has none of these.
        where: the key or option that holds it, for messages.

    Raises:
        UserError: a variable is not set or is empty, or there is no such user.
    """
    for braced, plain in _VARIABLE.findall(path):
        name = braced or plain
        if not os.environ.get(name):
            raise UserError(
                f"{where} names an environment variable that is not set",
                got=path,
                expected=f"a value of {name}",
                fix=f"export {name}=..., or write the path without it",
            )
    found = os.path.expandvars(path)
    if not found.startswith("~"):
        return found
    try:
        return str(Path(found).expanduser())
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{where} begins with a home directory that is not known",
            got=path,
            expected="~/ for your own home directory, or ~ and the name of a user of this machine",
            fix="write the whole path",
        ) from error


def with_places(values: Mapping[str, Any], where: str, folder: Path | None = None) -> dict[str, Any]:
    """Return the values of a configuration with paths that this process can open from its working directory.

    `~` and `$VAR` are expanded. A path that begins with ./ or ../ is taken from the recipe's folder, and any
    other from there too if it exists there. All others are taken from the working directory, as are names on
    the hub and of shipped files. Since run_dir is written, and need not exist, only its beginning counts.

    The results do not begin with ./ or ../, since a run's config.yaml, which is a recipe too, holds them.

    Args:
        values: by dotted key.
        where: the source of the values, for messages.
        folder: the folder of the recipe; None for the working directory, as on a command line.
    """
    return {
        key: _placed(key, expand(value, f"{key} in {where}"), folder)
        if key in PATH_KEYS and isinstance(value, str)
        else value
        for key, value in values.items()
    }


def _placed(key: str, path: str, folder: Path | None) -> str:
    here = Path.cwd()
    base = here if folder is None else folder
    is_relative = path in (".", "..") or path.startswith(("./", "../"))
    # os.path.exists is false for a text that cannot be a path at all. The strict reader refuses it later.
    is_there = folder is not None and key != "run_dir" and path != "" and os.path.exists(base / path)  # noqa: PTH110
    if Path(path).is_absolute() or not (is_relative or is_there):
        return path
    target = Path(os.path.abspath(base / path))  # noqa: PTH100  # resolve() would follow links
    # Without its ./ a path that does not exist would be taken for a name on the hub.
    is_path = key == "run_dir" or os.path.exists(target)  # noqa: PTH110
    return str(target.relative_to(here)) if is_path and here in target.parents else str(target)
