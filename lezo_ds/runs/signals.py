"""Requests to stop from outside a run: signals, and the end of DeepSpeed's launcher.

The launcher's inner process forwards SIGTERM and SIGINT to the ranks. Any other signal, and any signal to the
`deepspeed` command itself, ends only the process that receives it, and the ranks would run on unnoticed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Launchers send SIGTERM, a terminal sends SIGINT, and a batch system can be told to send SIGUSR1."""

_LAUNCHERS = ("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch")


@contextmanager
def on_stop_signals(action: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `action` with each stop signal that comes while the context is open, instead of ending."""
    handlers = {
        number: signal.signal(number, lambda received, _: action(signal.Signals(received)))
        for number in STOP_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class LauncherWatch:
    """DeepSpeed's launcher processes above this one; under mpirun, srun or without a launcher, none."""

    def __init__(self) -> None:
        self._parents: list[tuple[psutil.Process, psutil.Process]] = []
        child = psutil.Process()
        while (parent := child.parent()) is not None and _is_launcher(parent):
            self._parents.append((child, parent))
            child = parent

    def is_gone(self) -> bool:
        """Return whether one of these processes has ended since."""
        # A process gets another parent when its parent ends, even while the ended parent is still a zombie.
        try:
            return any(child.ppid() != parent.pid for child, parent in self._parents)
        except psutil.NoSuchProcess:  # each child above this process is a launcher, too
            return True


def _is_launcher(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()[:4]  # python -u -m program
    except psutil.Error:
        return False
    return any(Path(word).name in _LAUNCHERS for word in words)
