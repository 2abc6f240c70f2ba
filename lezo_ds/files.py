"""Writing of files that are either complete or absent, even after a crash or a power cut.

A file is written under a temporary name, synced, and renamed:

    .results.json.tmp    written, then fsync: the content is on the disk
    results.json         renamed: readers see the old content or the new one, never a part
    the directory        fsync: the new name is on the disk
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lezo_ds.errors import LezoError

DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
)
"""What reading a damaged JSON file may raise.

The file cannot be read, is no JSON, lacks a key, or has a value of another type, too deep a nesting
or too large a number.
"""


def sync(path: Path) -> None:
    """Sync a file's content to the disk, or a directory's entries (created, renamed, removed)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, and sync each into the one above."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def assert_regular(path: Path) -> None:
    """Raise an OSError if a path is there and no file, such as a pipe, which would never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """Return the content of a file that may come from anyone. OSError: see `assert_regular`."""
    assert_regular(path)
    return path.read_bytes()


@contextmanager
def failures_named(path: Path, kind: type[LezoError] = LezoError) -> Iterator[None]:
    """Turn an OSError into an error of a `kind` that says which file of a run cannot be written."""
    try:
        yield
    except OSError as error:
        raise kind(
            f"{path} cannot be written: {error}; fix: free space on its disk, allow writing, or "
            "give another name, then run the same command again"
        ) from error


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file so that readers, and a restart after a crash, see the old or the new content.

    Only one process may write to a path at a time. Text is stored as UTF-8.

    Raises:
        OSError: The file cannot be written. The old content is still there.
    """
    if isinstance(content, str):
        content = content.encode()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        # Of a crash, or in a directory of someone else, a link to a file elsewhere.
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            # Sync before the rename: a power cut could leave the new name with no content.
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)  # the rename itself survives a power cut only after this


def write_output(path: Path, content: bytes | str) -> None:
    """Write a file by `write_atomically`, and make its folder. LezoError: it cannot be written."""
    with failures_named(path):
        make_directory(path.parent)
        write_atomically(path, content)


def filled_template(path: Path, **values: Any) -> str:
    """Return a text of a Jinja template. A line that has only a block of it leaves no line."""
    from jinja2 import Template  # which few commands need

    template = Template(
        path.read_text(encoding="utf-8"), trim_blocks=True, keep_trailing_newline=True
    )
    text: str = template.render(**values)
    return text


def remove_directory(path: Path) -> None:
    """Remove a directory, if it is there. A crash leaves no part of it under its name."""
    if not path.is_dir():
        return
    removed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)  # what a crash in the last line has left
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
