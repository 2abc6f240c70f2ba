"""A command as a process of its own: its output in a file, its main lines shown, its end waited for."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lezo_ds.errors import LezoError, UserError

SHOWN_LINES = ("step ", "error: ")
"""How the lines begin that are shown of a run's output; its log has all."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

logger = logging.getLogger(__name__)


def run_logged(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> int:
    """Run a command to its end, add its output to `log`, show its main lines and return its exit code.

    SIGINT, SIGTERM and SIGUSR1 are passed on, once, as SIGTERM to all that the command started, so that a run
    may end well; at the second SIGKILL is. This returns only when all of it has ended.

    Args:
        command: program and arguments.
        log: file to append to; its directory exists.
        variables: environment variables beside those of this process.

    Raises:
        UserError: there is no such program.
        LezoError: a signal came.
    """
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, **(variables or {})}
    received: list[signal.Signals] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL if len(received) > 1 else signal.SIGTERM)

    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    except OSError as error:
        raise UserError(
            f"cannot start {command[0]}",
            got=str(error),
            expected="a program in PATH",
            fix="give its full path",
        ) from error
    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        with process, log.open("a") as file:
            assert process.stdout is not None
            for line in process.stdout:  # it ends when the last process that could write has ended
                file.write(line)
                file.flush()
                if line.startswith(SHOWN_LINES):
                    logger.info("  %s", line.rstrip())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise LezoError(f"stopped by {received[0].name}; the same command continues")
    return process.returncode
