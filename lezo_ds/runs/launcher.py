"""Watch for the end of DeepSpeed's launcher.

The launcher's inner process forwards SIGTERM and SIGINT to the ranks. Any other signal, and any signal to the
`deepspeed` command itself, ends only the process that receives it. The ranks would then run on unnoticed.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import psutil

_PROGRAMS = ("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch")


class LauncherWatch:
    """The launcher processes above this one at the time when this object was made.

    There are none under mpirun, srun or without a launcher. Then `is_gone` is always false.
    """

    def __init__(self) -> None:
        self._launchers = [parent.pid for parent in takewhile(_is_launcher, psutil.Process().parents())]

    def is_gone(self) -> bool:
        """Return whether one of these processes has ended since."""
        # A process whose parent ends gets another parent. This also shows while the ended one is a zombie.
        parents = psutil.Process().parents()
        return [parent.pid for parent in parents[: len(self._launchers)]] != self._launchers


def _is_launcher(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()[:4]  # python -u -m program
    except psutil.Error:
        return False
    return any(Path(word).name in _PROGRAMS for word in words)
