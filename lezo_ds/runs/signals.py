"""Requests to stop a run: signals, and the end of DeepSpeed's launcher, which most signals end alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Launchers send SIGTERM, a terminal sends SIGINT, and a batch system can be told to send SIGUSR1."""

_LAUNCHERS = {"deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch"}


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


def launchers() -> list[psutil.Process]:
    """Return DeepSpeed's launcher processes above this one; under mpirun or srun, none."""
    parents = psutil.Process().parents()
    names = (
        [Path(word).name for word in parent.cmdline()[:4]] for parent in parents
    )  # python -u -m program
    return [parent for parent, own in zip(parents, names, strict=True) if set(own) & _LAUNCHERS]


def any_ended(processes: Iterable[psutil.Process]) -> bool:
    try:
        return any(process.status() == psutil.STATUS_ZOMBIE for process in processes)
    except psutil.NoSuchProcess:
        return True
