"""Run a command as a child process, log all its output, and show the main lines."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lezo_ds.errors import LezoError, UserError
from lezo_ds.runs.signals import on_stop_signals

SHOWN_LINES = ("loading ", "resuming ", "scoring ", "step ", "error: ")
"""Prefixes of the lines that are shown. The log has all lines."""

PROGRESS = "training: "
"""Prefix of a run's progress bar, which a terminal shows and the log leaves out."""

logger = logging.getLogger(__name__)


def run_logged(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> int:
    """Run a command to its end, append its output to `log`, show the main lines and return the exit code.

    The first stop signal is passed on as SIGTERM to every process of the command, so that a run can save its
    state. The second one is passed on as SIGKILL. The function returns when all these processes have ended.

    Args:
        command: program and arguments.
        log: file to append to, in an existing directory.
        variables: environment variables that are set in addition to those of this process.

    Raises:
        UserError: there is no such program.
        LezoError: a stop signal was received.
    """
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, **(variables or {})}
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL if len(received) > 1 else signal.SIGTERM)

    try:
        # A session of its own gives the command a process group, which killpg can reach as a whole.
        process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    except OSError as error:
        raise UserError(
            f"cannot start {command[0]}",
            got=str(error),
            expected="a program in PATH",
            fix="give its full path",
        ) from error
    with on_stop_signals(stop), process, log.open("a") as file:
        assert process.stdout is not None
        # A carriage return ends a line, too. The loop ends when the last process that could write has ended.
        for line in process.stdout:
            if line.startswith(PROGRESS):
                if sys.stderr.isatty():
                    print(f"\r{line.rstrip()}", end="", file=sys.stderr, flush=True)
                continue
            file.write(line)
            file.flush()
            if line.startswith(SHOWN_LINES):
                logger.info("  %s", line.rstrip())
    if received:
        raise LezoError(f"stopped by {received[0].name}; fix: run the same command again to continue")
    return process.returncode
