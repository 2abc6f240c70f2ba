"""Files that are either whole or absent, even after a crash or a power cut."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lezo_ds.errors import LezoError


def sync_directory(path: Path) -> None:
    """Force a directory's entries (files created, renamed or removed in it) to the disk.

    Raises:
        OSError: the directory cannot be opened or synced.
    """
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Force a file's content to the disk, whoever wrote it.

    Raises:
        OSError: the file cannot be opened or synced.
    """
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents so that a crash does not lose them.

    Raises:
        OSError: one of them cannot be made, or is a file.
    """
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


@contextmanager
def failures_named(path: Path) -> Iterator[None]:
    """Turn an OSError into an error that names the file of a run that cannot be written.

    Raises:
        LezoError: instead of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise LezoError(
            f"{path} cannot be written; got: {error}; "
            "fix: make room on its disk or permit writing, then run the same command again"
        ) from error


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file so that readers, and a restart after a crash, see the old content or the new one.

    The content is written to `.<name>.tmp` in the same directory and synced. That file is then renamed, and
    the directory is synced. A path has one writer at a time, so the next writer may overwrite what a killed
    writer left under the temporary name.

    Args:
        path: file to create or replace, in an existing directory.
        content: bytes, or text that is stored as UTF-8 without changing its line ends.

    Raises:
        OSError: the disk is full, or the directory is missing or not writable. The old content stays.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
