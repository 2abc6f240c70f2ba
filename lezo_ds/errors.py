"""The errors that this package raises on purpose, and how a process ends with one.

Each kind of error has an exit code (docs/reliability.md lists them), so that a batch script can
tell a mistake of the user from a lost machine. A command ends with one line on stderr, even on
many ranks and with many threads (see `end_with`).
"""

from __future__ import annotations

import difflib
import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from typing import NoReturn

# Where launchers put the rank of a process: torch and DeepSpeed, Open MPI, srun, other MPIs.
_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")
# What else says that a process is one of several ranks.
_LAUNCH_NAMES = (
    *_RANK_NAMES,
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "PMI_SIZE",
    "PMIX_RANK",
)

# How long a rank that is not the first to report an error waits for the launcher to end it.
_SILENCE_SECONDS = 10.0
_LOST_RANK_SECONDS = 3.0

# The longest error line, in characters. Messages quote values of the user, which may be long.
_MAX_LINE = 2000

# What a terminal would follow as a command, or what changes the order of the characters in a line.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# A progress bar goes back to the start of its line, and bars of several downloads go up a line.
_COMMANDS_BUT_OF_BARS = re.compile(rf"(?!\r|\x1b\[A){_COMMANDS.pattern}")

# How like a name must be to a known one to be its misspelling: the share of common characters.
_LIKENESS = 0.7

# Held by the thread that ends the process, and never released.
_ending = threading.Lock()


def cut(text: str, limit: int) -> str:
    """Return a text as an error shows it: cut off after `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def printable(text: str, *, has_bars: bool = False) -> str:
    """Return a text with "?" for each character that commands a terminal. Newlines and tabs stay.

    What is printed may quote a run, a model or a file of anyone.

    Args:
        text: what is printed.
        has_bars: whether what progress bars write stays, too.
    """
    commands = _COMMANDS_BUT_OF_BARS if has_bars else _COMMANDS
    return commands.sub("?", text)


def last_step(num_steps: int) -> str:
    """Return the index of the last of some steps, as errors name it."""
    return str(num_steps - 1) if num_steps > 0 else "none"


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the fix for an unknown name.

    Args:
        name: What the user wrote.
        known: The names that exist. The nearest one counts, in upper or lower case.
        otherwise: The fix if no known name is near.
    """
    near = nearest(name, known)
    return f"did you mean {near[0]}?" if near else otherwise


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name that is nearest to `name` in upper or lower case, or no name."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=_LIKENESS)
    return [by_lower[each] for each in near]


class LezoError(Exception):
    """Base class of the errors that this package raises on purpose.

    Attributes:
        exit_code: The code that a command ends with.
    """

    exit_code = 1


class UserError(LezoError):
    """Bad input: one sentence that has what is wrong, the value and what was expected, and a fix.

    >>> print(UserError("zo.sparsity=1.5 is not between 0 and 1", fix="set zo.sparsity=0.75"))
    zo.sparsity=1.5 is not between 0 and 1; fix: set zo.sparsity=0.75
    """

    exit_code = 2

    def __reduce__(self) -> tuple[object, ...]:
        # Ranks exchange errors by pickling them. The default would call __init__ without its
        # keyword arguments, and the message already holds all of them.
        return type(self), (str(self),)

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(f"{message}; fix: {fix}" if fix else message)


class HubError(UserError):
    """A model or a data set cannot be loaded from the hub. Another attempt or host may succeed."""


class JournalError(LezoError):
    """The journal cannot be written, or its content is damaged."""

    exit_code = 3


class DivergenceError(LezoError):
    """Too many steps in a row were skipped because their losses were not finite."""

    exit_code = 4


class DesyncError(LezoError):
    """The ranks do not do the same work, or a rank's weights differ from those of the run."""

    exit_code = 5


class LostRankError(LezoError):
    """A rank has ended, or did not answer in time."""

    exit_code = 6


def require_package(name: str, problem: str, requirement: str) -> None:
    """Refuse to go on without a package. `requirement` is what pip installs."""
    if find_spec(name) is None:
        raise UserError(problem, fix=f"pip install {requirement}")


def launched_rank() -> int:
    """Return the rank that the launcher gave this process, or 0 if no launcher started it.

    The rank is known from the environment, before the process group starts.
    """
    for name in _RANK_NAMES:
        if name in os.environ:
            return int(os.environ[name])
    return 0


def forget_launcher() -> None:
    """Make this process, and those that it starts, the only rank of their launch."""
    for name in _LAUNCH_NAMES:
        os.environ.pop(name, None)


def leave(exit_code: int) -> NoReturn:
    """End the process at once, and the processes that user functions have started.

    Not sys.exit, which destroys the process group: that waits for ranks in a collective.
    """
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(exit_code)


def end_with(error: LezoError) -> NoReturn:
    """Print an error as one line and end the process with the error's exit code.

    One line of one rank is enough: the other ranks wait before they print theirs, and the launcher
    ends them while they wait. A lost rank may be rank 0 itself, so rank 1 also prints that error at
    once. Rank 1 then waits before it ends, so that the launcher ends with the exit code of the rank
    that failed first.

    Any thread may call this function. The error of the first thread counts.
    """
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # forever: the other thread ends the process
    rank = launched_rank()
    is_lost = isinstance(error, LostRankError)
    if is_lost and rank > 1:
        time.sleep(_LOST_RANK_SECONDS)
    elif not is_lost and rank > 0:
        time.sleep(_SILENCE_SECONDS)
    line = cut(one_line(error), _MAX_LINE)
    print(f"error: {printable(line)}", file=sys.stderr, flush=True)
    with suppress(OSError):  # what is printed goes to a full disk
        sys.stdout.flush()
    if is_lost and rank == 1:
        time.sleep(_LOST_RANK_SECONDS)
    leave(error.exit_code)


def one_line(text: object) -> str:
    """Return a text, or what an error says, without line breaks and other runs of spaces."""
    return " ".join(str(text).split())


def first_line(error: Exception) -> str:
    """Return the type of an error of a library, and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
