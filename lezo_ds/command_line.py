"""What all commands share: arguments, logging, and errors that become one line and an exit code.

A command imports torch and other large libraries in its `main`, after its arguments have been checked. These
imports take several seconds, and neither --help nor a typo should wait for them.
"""

from __future__ import annotations

import argparse
import atexit
import io
import logging
import os
import resource
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO

from lezo_ds.config.overrides import as_overrides, is_key_option
from lezo_ds.config.reading import nearest
from lezo_ds.config.schema import SCHEMA
from lezo_ds.errors import LezoError, UserError, end_with, launched_rank

KEYS_HELP = "change a key of the recipe or run; --key value and --key=value do the same"
"""The help of the positional argument that `parse_with_keys` fills."""

_MIN_OPEN_FILES = 64
"""A rank of a small run needs 25. Messages between ranks and files of weights need more."""


def run_main(main: Callable[[], None]) -> None:
    """Run a command and end the process. The exit code is 0 if it succeeds, else that of the error.

    An error of this package is printed as one line (see `lezo_ds.errors.end_with`).
    """
    sys.stdout, sys.stderr = _without_broken_pipe(sys.stdout), _without_broken_pipe(sys.stderr)
    logging.basicConfig(level=logging.INFO if launched_rank() == 0 else logging.ERROR, format="%(message)s")
    for noisy in ("DeepSpeed", "httpx", "datasets", "torch.distributed"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        _check_open_files()
        main()
    except LezoError as error:
        end_with(error)
    # A command that did not need torch has not imported this module.
    if "lezo_ds.distributed" in sys.modules:
        sys.modules["lezo_ds.distributed"].shut_down()
    _end()


class _Output(io.FileIO):
    """An output whose writes have no effect once its reader is gone, as in `train.py ... | head -1`.

    The error would otherwise end a run in the middle, or after all its files are saved.
    """

    def write(self, data: Any) -> int:  # noqa: ANN401
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def _without_broken_pipe(stream: TextIO | None) -> TextIO:
    if stream is None:  # the descriptor was closed before the start
        return Path(os.devnull).open("w")
    stream.flush()
    output = _Output(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(output),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=bool(stream.line_buffering) or stream.isatty(),
    )


def _check_open_files() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < _MIN_OPEN_FILES:
        raise UserError(
            "the limit of open files is too low",
            got=limit,
            expected=f"at least {_MIN_OPEN_FILES}",
            fix="ulimit -n 1024, in the shell that starts the command",
        )


def _end() -> None:
    """End the process successfully, without the shutdown of the interpreter.

    During that shutdown, a thread of gloo that frees the tensors of the last message sometimes aborts the
    process, after all work is done (torch 2.13; see PyTorch pull request 179291).
    """
    # os._exit skips the exit handlers, in which monitors flush. Python 3.11 has no public method for them.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError, so that its errors are one line with exit code 2.

    Attributes:
        takes_keys: whether the arguments may be keys of a recipe; see `parse_with_keys`.
    """

    takes_keys = False

    def error(self, message: str) -> NoReturn:
        unknown = [word.partition("=")[0] for word in message.split() if word.startswith("-")]
        near = self._near(unknown[0]) if unknown else []
        hint = f"did you mean {near[0]}? " if near and near[0] not in message else ""
        if self.takes_keys and unknown and is_key_option(unknown[0]):
            hint = f"give its value, as in {unknown[0]} VALUE; "
        raise UserError(
            message,
            got=shlex.join(sys.argv[1:]),
            expected=self.format_usage().removeprefix("usage: ").strip(),
            fix=f"{hint}see {self.prog} --help",
        )

    def _near(self, unknown: str) -> list[str]:
        if not self.takes_keys:
            return nearest(unknown, self._option_string_actions)
        leaves = [f"--{key}" for key in SCHEMA.keys if key.rpartition(".")[2] == unknown.removeprefix("--")]
        return leaves or nearest(
            unknown, [*self._option_string_actions, *(f"--{key}" for key in SCHEMA.keys)]
        )


def parser(command: str | None, description: str) -> _Parser:
    """Return an argument parser that also accepts the argument that the DeepSpeed launcher adds.

    Its methods raise UserError for bad arguments.

    Args:
        command: name of the command; None for `lezo-ds` itself.
        description: shown by --help.
    """
    made = _Parser(
        prog="lezo-ds" if command is None else f"lezo-ds {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return made


def parse_with_keys(parser: _Parser) -> argparse.Namespace:
    """Return the arguments of a command that also takes keys of a recipe.

    `--key value`, `--key=value` and `key=value` are the same (see `as_overrides`). All become `key=value`
    words of a positional argument.

    Raises:
        UserError: an argument is unknown or not valid.
    """
    parser.takes_keys = True
    lists = [option for action in parser._actions if action.nargs == "+" for option in action.option_strings]
    return parser.parse_intermixed_args(as_overrides(sys.argv[1:], lists))
