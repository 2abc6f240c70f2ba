"""The errors of this package. A message says what is wrong, the value, the expected value, and the fix."""

from __future__ import annotations


class LezoError(Exception):
    """Base class of the errors that this package raises on purpose. Commands exit with `exit_code`."""

    exit_code = 1


class UserError(LezoError):
    """Bad input: a config value, a file, or a command line. The message is one line.

    Args:
        what: what is wrong, with the name of the key, file or record.
        got: the invalid value, shown with repr unless it is a string.
        expected: the valid values.
        fix: what the user can do about it.

    >>> print(UserError("zo.sparsity is too large", got=1.5, expected="0 to 1", fix="set zo.sparsity=0.75"))
    zo.sparsity is too large; got: 1.5; expected: 0 to 1; fix: set zo.sparsity=0.75
    """

    exit_code = 2

    def __reduce__(self) -> tuple[object, ...]:
        # Ranks exchange errors by pickling them. The default would call __init__ without its keyword
        # arguments, and the message already holds all of them.
        return type(self), (str(self),)

    def __init__(self, what: str, *, got: object = None, expected: str = "", fix: str = "") -> None:
        parts = [what]
        if got is not None:
            parts.append(f"got: {got if isinstance(got, str) else repr(got)}")
        if expected:
            parts.append(f"expected: {expected}")
        if fix:
            parts.append(f"fix: {fix}")
        super().__init__("; ".join(parts))


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
