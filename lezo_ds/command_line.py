"""What all commands share: arguments, logging, and errors as one line and an exit code.

A command imports torch and the like in its `main`, after its arguments were found to be right: they take
several seconds of CPU time, which --help and a typo do not need.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from lezo_ds.config.reading import nearest
from lezo_ds.errors import LezoError, LostRankError, UserError

_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")
_SILENCE_SECONDS = 10.0
_LOST_RANK_SECONDS = 3.0


def run(main: Callable[[], None]) -> None:
    """Run a command and end the process: with 0 if it succeeds, else with the error's own exit code.

    An error of this package is printed as one line. If all ranks raise the same error, the line of rank 0 is
    enough: the other ranks wait, and the launcher ends them before they print theirs. A lost rank may be
    rank 0, so rank 1 prints that error at once, too. Then it waits, so that the launcher ends with the exit
    code of a rank that knows more.
    """
    logging.basicConfig(level=logging.INFO if _rank() == 0 else logging.ERROR, format="%(message)s")
    for noisy in ("DeepSpeed", "httpx", "datasets", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        main()
    except LezoError as error:
        is_lost = isinstance(error, LostRankError)
        if _rank() > is_lost:
            time.sleep(_LOST_RANK_SECONDS if is_lost else _SILENCE_SECONDS)
        line = " ".join(str(error).split())  # what it quotes may hold line breaks
        print(f"error: {line}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if is_lost and _rank() == 1:
            time.sleep(_LOST_RANK_SECONDS)
        # Not sys.exit: the peers may be in a collective, which the end of the process group would wait for.
        os._exit(error.exit_code)
    if "lezo_ds.distributed" in sys.modules:
        sys.modules["lezo_ds.distributed"].shut_down()
    _end()


def _end() -> None:
    """End the process successfully without the interpreter's own shutdown.

    A thread of gloo that frees the tensors of the last message during that shutdown sometimes aborts the
    process (torch 2.13), after all work is done.
    """
    atexit._run_exitfuncs()  # monitors flush here
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _rank() -> int:
    return int(next((os.environ[name] for name in _RANK_NAMES if name in os.environ), "0"))


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are errors of this package: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        unknown = [word for word in message.split() if word.startswith("-")]
        near = nearest(unknown[0].partition("=")[0], self._option_string_actions) if unknown else []
        hint = f"did you mean {near[0]}? " if near and near[0] not in message else ""
        raise UserError(
            message,
            got=shlex.join(sys.argv[1:]),
            expected=self.format_usage().removeprefix("usage: ").strip(),
            fix=f"{hint}see {self.prog} --help",
        )


def parser(description: str) -> argparse.ArgumentParser:
    """Return an argument parser that also accepts what the DeepSpeed launcher adds.

    Its methods raise UserError for bad arguments.
    """
    made = _Parser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return made
