"""Whether DeepSpeed's launcher is still there.

Its inner process passes on SIGTERM and SIGINT. Any other signal, and any to the `deepspeed` command itself,
only ends the process that gets it, and the ranks would go on unseen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROGRAMS = ("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch")
_PROCESSES = Path("/proc")


class LauncherWatch:
    """The processes of DeepSpeed's launcher above this one, as they were when this object was made.

    Without any (under mpirun, srun or no launcher; where there is no /proc) none is ever missed.
    """

    def __init__(self) -> None:
        self._parents = dict(_launchers(os.getpid()))

    def is_gone(self) -> bool:
        """Return whether one of them has ended since."""
        return any(_parent(child) != parent for child, parent in self._parents.items())


def _launchers(pid: int) -> Iterator[tuple[int, int]]:
    """Yield (process, its parent) upwards from a process, as long as the parent is one of the launcher's."""
    while (parent := _parent(pid)) is not None and _is_launcher(parent):
        yield pid, parent
        pid = parent


def _is_launcher(pid: int) -> bool:
    try:
        words = (_PROCESSES / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return any(Path(word).name in _PROGRAMS for word in words[:4])  # python -u -m program


def _parent(pid: int) -> int | None:
    """Return a process's parent, None if there is no such process."""
    try:
        text = (_PROCESSES / str(pid) / "stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])  # "pid (name) state parent ..."
