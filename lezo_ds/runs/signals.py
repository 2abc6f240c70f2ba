"""Signals that ask a process to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Launchers send SIGTERM, a terminal sends SIGINT, and a batch system can be told to send SIGUSR1."""


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
