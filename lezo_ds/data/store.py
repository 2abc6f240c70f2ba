"""Arrow files that the ranks of a machine share: written once, mapped into the memory of each.

The first rank of each machine writes, and the others wait:

    cache/lezo_ds/KEY/data-00000.arrow    kept for the next start, if all that decides it is known
    tmp/lezo_ds-RANDOM/data-00000.arrow   else, and removed once all ranks have mapped it

The key is a hash of all that decides the content. A start with the same key finds the files there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
from datasets import Dataset, concatenate_datasets

from lezo_ds import distributed
from lezo_ds.errors import LezoError
from lezo_ds.files import sha256_file

_FEWEST_BYTES = 1 << 23
"""Smaller sources are read faster than a cache of them is worth."""


def shared_dataset(key: str | None, write: Callable[[Path], None]) -> Dataset:
    """Return the rows that `write` puts into Arrow files of a folder. A collective.

    Args:
        key: of the cache, see `key_of`; None if the rows are not to be kept.
        write: (folder) -> None, on one rank of each machine.

    Raises:
        LezoError: what `write` raises, on all ranks.
    """
    outcome: Path | LezoError | None = None
    if _writes():
        try:
            outcome = _provide(None if key is None else _cache() / key, write)
        except LezoError as error:
            outcome = error
    outcomes = [outcome]
    writer = 0
    is_shared = distributed.world_size() > 1
    if is_shared:
        outcomes = distributed.gather_objects(outcome)
        writer = distributed.rank() - distributed.local_rank()  # the first rank of this machine
    for each in outcomes:
        if isinstance(each, LezoError):
            raise each
    folder = outcomes[writer]
    assert isinstance(folder, Path)
    files = sorted(folder.glob("*.arrow"))
    rows = concatenate_datasets([Dataset.from_file(str(file)) for file in files])
    if is_shared:
        distributed.barrier()
    if folder.parent != _cache():
        shutil.rmtree(folder, ignore_errors=True)  # mapped files stay until they are closed
    return rows


def _writes() -> bool:
    """Return whether this rank writes files. Before ranks have joined, each writes for itself."""
    return distributed.world_size() == 1 or distributed.local_rank() == 0


def _cache() -> Path:
    return Path(datasets.config.HF_DATASETS_CACHE) / "lezo_ds"


def _provide(kept: Path | None, write: Callable[[Path], None]) -> Path:
    """Return the folder of the files: the one in the cache, or else a temporary one."""
    if kept is not None and kept.is_dir():
        return kept
    temporary = Path(tempfile.mkdtemp(prefix="lezo_ds-"))
    try:
        write(temporary)
    except LezoError:
        shutil.rmtree(temporary)
        raise
    if kept is None:
        return temporary
    part = kept.with_name(f".{kept.name}.{os.getpid()}")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(temporary, part)
        part.replace(kept)
    except OSError:  # a home that is full or read-only, or another run was faster
        shutil.rmtree(part, ignore_errors=True)
        return temporary
    shutil.rmtree(temporary, ignore_errors=True)
    return kept


def key_of(files: Sequence[Path], *others: object) -> str | None:
    """Return a hash of the content of files and of other values; None for small files.

    It is None, too, on the ranks that do not write, so that one rank of a machine reads the files.
    """
    if not files or not _writes() or sum(file.stat().st_size for file in files) < _FEWEST_BYTES:
        return None
    return _hash_of(*others, *map(sha256_file, files))


def key_of_part(key: str | None, *others: object) -> str | None:
    """Return the key of what other values make of the content with a key; None if it has none."""
    return None if key is None else _hash_of(key, *others)


def _hash_of(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:32]
