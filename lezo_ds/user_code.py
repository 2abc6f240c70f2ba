"""User functions are called with care: they may raise or return anything."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lezo_ds.errors import LezoError, UserError, cut, one_line

T = TypeVar("T")


@contextmanager
def same_directory(name: str) -> Iterator[None]:
    """Raise UserError if the working directory changes, to which the paths of a run are relative.

    Args:
        name: the recipe key and its value whose code runs, such as train.objective=module:function.
    """
    folder = Path.cwd()
    yield
    if Path.cwd() != folder:
        raise UserError(
            f"{name} changed the working directory to {Path.cwd()}, and the paths of a run are "
            f"relative to {folder}",
            fix="remove os.chdir, or go back before it returns",
        )


def call_of_user(name: str, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call a user function, or run it if it is async.

    An exception in it becomes a UserError with its file and line.

    Args:
        name: the recipe key and its value, such as train.objective=module:function.
        function: the function.
        arguments: its arguments.
        named: further ones by name.

    Raises:
        UserError: it failed, or it changed the working directory.
    """
    try:
        with same_directory(name):
            returned = function(*arguments, **named)
            return asyncio.run(returned) if inspect.iscoroutine(returned) else returned
    except LezoError:
        raise
    # sys.exit() in the function would end the run as if all its steps were done.
    except (Exception, SystemExit) as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        where = ""
        if frame.f_code is not call_of_user.__code__:  # else the arguments do not fit the function
            where = f" ({frame.f_code.co_filename} line {line})"
        raise UserError(
            f"{name} failed: {type(error).__name__}: {error}{where}", fix="correct the function"
        ) from error


def shown(value: object) -> str:
    """Return what a user function returned, as an error shows it."""
    try:
        return cut(one_line(value), 80)
    except Exception:  # an integer of over 4300 digits, or a user-defined class
        return f"an object of type {type(value).__name__} that cannot be printed"
