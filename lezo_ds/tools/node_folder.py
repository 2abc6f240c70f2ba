"""A temporary folder with the same name and files on every node, for models of random weights."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

from lezo_ds import distributed


@contextmanager
def folder_on_every_node(write: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a temporary folder that holds what `write` puts into it. A collective.

    Each node usually has a temporary directory of its own, but nodes may also share one. So rank 0
    only draws the folder's name. The rank that is the first to make the folder in its file system
    writes the files there, and removes them when all ranks have left the context.
    """
    # Nobody can guess the name, so nobody else can have prepared a link of this name.
    name = distributed.on_rank_zero(lambda: f"lezo_ds-{secrets.token_hex(16)}")
    folder = Path(gettempdir(), name)
    try:
        folder.mkdir(mode=0o700)
        is_owner = True
    except FileExistsError:
        is_owner = False
    try:
        if is_owner:
            write(folder)
        distributed.barrier()  # from here on, the files are complete on every node
        yield folder
        distributed.barrier()  # no rank reads them any more
    finally:
        if is_owner:
            shutil.rmtree(folder, ignore_errors=True)
