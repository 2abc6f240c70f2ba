"""Requests to stop a run: signals, and the end of DeepSpeed's launcher.

Most signals end the launcher alone, and its ranks go on.

A user function may start processes, which Python forks from this one. They end at SIGTERM,
as `terminate()` expects of them, and leave Ctrl-C to the run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Launchers send SIGTERM, a terminal sends SIGINT, a batch system can be told to send SIGUSR1."""

_PATIENCE_SECONDS = 5.0  # launchers repeat a signal at once

_of_children: dict[int, Any] = {}
"""The handlers of forked processes, while a run has its own."""

_LAUNCHERS = {"deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch"}
"""Programs and modules of DeepSpeed that start ranks and wait for them."""


class Stopped(Exception):  # noqa: N818  # this is not an error
    """All ranks have agreed to stop the run. It leaves the loop from any depth."""


@contextmanager
def on_stop_signals(action: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `action` with each stop signal that comes while the context is open, instead of ending.

    `action` runs in the main thread between two lines of any code, so it should only set a flag. A
    signal that comes `_PATIENCE_SECONDS` after the first one then does what it would do without
    this context: what the process waits for may never come.
    """
    earlier_handlers: dict[int, Any] = {}
    received: list[float] = []  # when signals came

    def handle(number: int, _: object) -> None:
        received.append(time.monotonic())
        action(signal.Signals(number))
        if received[-1] - received[0] >= _PATIENCE_SECONDS:
            signal.signal(number, earlier_handlers[number])
            os.kill(os.getpid(), number)

    for stop_signal in STOP_SIGNALS:
        earlier_handlers[stop_signal] = signal.signal(stop_signal, handle)
    _of_children.update(earlier_handlers)
    _of_children[signal.SIGINT] = signal.SIG_IGN
    try:
        yield
    finally:
        _of_children.clear()
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)


def _mask(how: int) -> None:
    signal.pthread_sigmask(how, list(_of_children))


def _begin_child() -> None:
    for number, handler in _of_children.items():
        signal.signal(number, handler)
    _mask(signal.SIG_UNBLOCK)


# A child that is told to end before it has its handlers would else go on.
os.register_at_fork(
    before=lambda: _mask(signal.SIG_BLOCK),
    after_in_parent=lambda: _mask(signal.SIG_UNBLOCK),
    after_in_child=_begin_child,
)


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
