"""Arrow files that the ranks of a machine share: written once, mapped into the memory of each.

The first rank of each machine writes, and the others wait:

    cache/lezo_ds/KEY/data-00000.arrow    kept for the next start, if all that decides it is known
    tmp/lezo_ds-KEY/data-00000.arrow      else, and removed once all ranks have mapped it

The key is a hash of all that decides the content. A start with the same key finds the files there.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
from datasets import Dataset, concatenate_datasets

from lezo_ds import distributed
from lezo_ds.errors import LezoError

_FEWEST_BYTES = 1 << 23
"""Smaller sources are read faster than a cache of them is worth."""


def shared_dataset(key: str | None, write: Callable[[Path], None]) -> Dataset:
    """Return the rows that `write` puts into Arrow files of a folder. A collective.

    Args:
        key: of the cache; None if the rows are not to be kept.
        write: (folder) -> None, on one rank of each machine.

    Raises:
        LezoError: what `write` raises, on all ranks.
    """
    name = distributed.broadcast_object(secrets.token_hex(8) if key is None else key)
    temporary = Path(tempfile.gettempdir()) / f"lezo_ds-{name}"
    outcome: LezoError | Path | None = None
    if distributed.local_rank() == 0:
        try:
            outcome = _written(name, temporary, write, is_kept=key is not None)
        except LezoError as error:
            outcome = error
    # Without rank 0's outcome, none is there.
    for each in distributed.gather_objects(outcome):
        if isinstance(each, LezoError):
            raise each
    folder = temporary
    if key is not None and (_cache() / name).is_dir():
        folder = _cache() / name
    files = sorted(folder.glob("*.arrow"))
    rows = concatenate_datasets([Dataset.from_file(str(file)) for file in files])
    distributed.barrier()
    if folder == temporary and distributed.local_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)  # mapped files stay until they are closed
    return rows


def _cache() -> Path:
    return Path(datasets.config.HF_DATASETS_CACHE) / "lezo_ds"


def _written(name: str, temporary: Path, write: Callable[[Path], None], *, is_kept: bool) -> Path:
    """Return the folder with the files, which are there or are written now."""
    kept = _cache() / name
    if is_kept and kept.is_dir():
        return kept
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    write(temporary)
    if is_kept:
        try:
            part = kept.with_name(f".{name}.{os.getpid()}")
            part.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(temporary, part)
            part.replace(kept)
            shutil.rmtree(temporary, ignore_errors=True)
            return kept
        except OSError:  # a home that is full or read-only, or another run was faster
            shutil.rmtree(part, ignore_errors=True)
    return temporary


def key_of(files: Sequence[Path], *others: object) -> str | None:
    """Return a hash of the content of files and of other values; None for small files."""
    if not files or sum(file.stat().st_size for file in files) < _FEWEST_BYTES:
        return None
    digest = hashlib.sha256(repr(others).encode())
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:32]
