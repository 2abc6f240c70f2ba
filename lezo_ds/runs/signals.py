"""Requests to stop a run: signals, and the end of DeepSpeed's launcher.

Most signals end the launcher alone, and its ranks go on.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Launchers send SIGTERM, a terminal sends SIGINT, a batch system can be told to send SIGUSR1."""

_LAUNCHERS = {"deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch"}
"""Programs and modules of DeepSpeed that start ranks and wait for them."""


class Stopped(Exception):  # noqa: N818  # this is not an error
    """All ranks have agreed to stop the run. It leaves the loop from any depth."""


@contextmanager
def on_stop_signals(action: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `action` with each stop signal that comes while the context is open, instead of ending.

    `action` runs in the main thread between two lines of any code, so it should only set a flag.
    """
    earlier_handlers = {}
    for number in STOP_SIGNALS:
        earlier_handlers[number] = signal.signal(
            number, lambda received, _: action(signal.Signals(received))
        )
    try:
        yield
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)


def launchers() -> list[psutil.Process]:
    """Return DeepSpeed's launcher processes above this one; under mpirun or srun, none."""
    found = []
    # A process of another user may be hidden, as by hidepid. Launchers are this user's.
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            # The name is within the first words of `python -u -m deepspeed.launcher.launch ...`.
            first_words = {Path(word).name for word in process.cmdline()[:4]}
            if first_words & _LAUNCHERS:
                found.append(process)
    return found


def any_ended(processes: Iterable[psutil.Process]) -> bool:
    """Return whether one of these processes has ended, waited for by its parent or not."""
    try:
        return any(process.status() == psutil.STATUS_ZOMBIE for process in processes)
    except psutil.NoSuchProcess:
        return True
