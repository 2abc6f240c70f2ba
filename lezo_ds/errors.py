"""The errors of this package, and how a process ends with one."""

from __future__ import annotations

import difflib
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import NoReturn

_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")
_SILENCE_SECONDS = 10.0
_LOST_RANK_SECONDS = 3.0
_ending = threading.Lock()


def cut(text: str, limit: int) -> str:
    """Return a text as an error shows it: cut off after `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the fix of an unknown name: the nearest known one in any case, or what to do `otherwise`."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"did you mean {by_lower[near[0]]}?" if near else otherwise


class LezoError(Exception):
    """Base class of the errors that this package raises on purpose. Commands exit with `exit_code`."""

    exit_code = 1


class UserError(LezoError):
    """Bad input: one sentence that has what is wrong, the value and what was expected, and a fix.

    >>> print(UserError("zo.sparsity=1.5 is not between 0 and 1", fix="set zo.sparsity=0.75"))
    zo.sparsity=1.5 is not between 0 and 1; fix: set zo.sparsity=0.75
    """

    exit_code = 2

    def __reduce__(self) -> tuple[object, ...]:
        # Ranks exchange errors by pickling them. The default would call __init__ without its keyword
        # arguments, and the message already holds all of them.
        return type(self), (str(self),)

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(f"{message}; fix: {fix}" if fix else message)


class HubError(UserError):
    """A model or a data set cannot be loaded from the hub. A later attempt, or another host, may succeed."""


class JournalError(LezoError):
    """The journal cannot be written, or its content is damaged."""

    exit_code = 3


class DivergenceError(LezoError):
    """Too many steps in a row were skipped because their losses were not finite, or were outliers."""

    exit_code = 4


class DesyncError(LezoError):
    """The ranks do not do the same work, or the weights of a rank differ from those of the run."""

    exit_code = 5


class LostRankError(LezoError):
    """A rank has ended, or did not answer in time."""

    exit_code = 6


def launched_rank() -> int:
    """Return the rank that the launcher gave this process. It is known before the process group starts."""
    return int(next((os.environ[name] for name in _RANK_NAMES if name in os.environ), "0"))


def end_with(error: LezoError) -> NoReturn:
    """Print an error as one line and end the process with the error's exit code. Any thread may call it.

    One line is enough: the other ranks wait, and the launcher ends them before they print theirs. A lost rank
    may be rank 0, so rank 1 also prints that error at once. It then waits, so that the launcher ends with the
    exit code of the rank that failed first. The first of several threads counts.
    """
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # the other thread ends the process
    is_lost = isinstance(error, LostRankError)
    rank = launched_rank()
    if rank > is_lost:
        time.sleep(_LOST_RANK_SECONDS if is_lost else _SILENCE_SECONDS)
    line = cut(
        " ".join(str(error).split()), 2000
    )  # a quoted value may be long, and have line breaks
    line = "".join(
        char if char.isprintable() else "?" for char in line
    )  # or commands to the terminal
    print(f"error: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if is_lost and rank == 1:
        time.sleep(_LOST_RANK_SECONDS)
    # Not sys.exit, which destroys the process group and waits for ranks that may be in a collective.
    os._exit(error.exit_code)
