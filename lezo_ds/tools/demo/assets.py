"""A directory of data and a model, which is made once and never half written."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from lezo_ds.errors import UserError

MANIFEST = "demo_assets.json"

logger = logging.getLogger(__name__)


def make_assets(directory: Path, manifest: str, write: Callable[[Path], None]) -> None:
    """Write assets, unless they exist already. Assets with another manifest are replaced.

    Everything is built in a second directory that is renamed at the end.

    Args:
        directory: directory of the assets.
        manifest: everything that determines the assets, as text.
        write: writes the assets to a new directory.

    Raises:
        UserError: `directory` holds something other than assets.
    """
    if _are_current(directory, manifest):
        return
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        write(unfinished)
        (unfinished / MANIFEST).write_text(manifest, encoding="utf-8")
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _are_current(directory: Path, manifest: str) -> bool:
    """Return whether a directory holds the assets of this manifest.

    Raises:
        UserError: it holds something else, which must not be replaced.
    """
    path = directory / MANIFEST
    if path.is_file():
        return path.read_text(encoding="utf-8") == manifest
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(
            "the directory for the demonstration's assets holds something else",
            got=str(directory),
            expected=f"a new or empty directory, or one with {MANIFEST}",
            fix="name another directory",
        )
    return False
