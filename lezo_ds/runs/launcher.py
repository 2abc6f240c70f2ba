"""Watch for the end of DeepSpeed's launcher.

The launcher's inner process forwards SIGTERM and SIGINT to the ranks. Any other signal, and any signal to the
`deepspeed` command itself, ends only the process that receives it. The ranks would then run on unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_PROGRAMS = ("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch")


class LauncherWatch:
    """The launcher processes above this one at the time when this object was made.

    There are none under mpirun, srun or without a launcher. Then `is_gone` is always false.
    """

    def __init__(self) -> None:
        self._parents = list(_launchers())

    def is_gone(self) -> bool:
        """Return whether one of these processes has ended since."""
        # A process gets another parent when its parent ends, even while the ended parent is still a zombie.
        try:
            return any(child.ppid() != parent.pid for child, parent in self._parents)
        except psutil.NoSuchProcess:  # each child above this process is a launcher, too
            return True


def _launchers() -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """Yield (process, its parent) from this process upwards, as long as the parent is a launcher."""
    child = psutil.Process()
    while (parent := child.parent()) is not None and _is_launcher(parent):
        yield child, parent
        child = parent


def _is_launcher(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()[:4]  # python -u -m program
    except psutil.Error:
        return False
    return any(Path(word).name in _PROGRAMS for word in words)
