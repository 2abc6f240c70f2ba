"""What every command shares: arguments, logging, and errors as one line and an exit code."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import sys
import time
from collections.abc import Callable

from lezo_ds import distributed
from lezo_ds.errors import LezoError, LostRankError

_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK")
_SILENCE_SECONDS = 10.0
_LOST_RANK_SECONDS = 3.0


def run(main: Callable[[], None]) -> None:
    """Run a command and end the process: 0 if it went well, else the error's own exit code.

    An error of this package is printed as one line. When all ranks meet the same, rank 0's line is enough:
    the others wait for the launcher to end them before they speak. Of a lost rank rank 1 speaks at once too,
    as it may be rank 0; then it waits, so that the launcher ends with the code of a rank that knows better.
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
    distributed.shut_down()
    _end()


def _end() -> None:
    """End the process well, past the interpreter's own end.

    A thread of gloo that frees the tensors of the last message while Python is being taken down aborts the
    process (torch 2.13), now and then, after all work is done.
    """
    atexit._run_exitfuncs()  # monitors flush here
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _rank() -> int:
    return int(next((os.environ[name] for name in _RANK_NAMES if name in os.environ), "0"))


def parser(description: str) -> argparse.ArgumentParser:
    """Return an argument parser that also accepts what the DeepSpeed launcher adds."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return made
