"""One family of errors: each says what is wrong, what was given, what was expected, and how to fix it."""

from __future__ import annotations


class LezoError(Exception):
    """Base of all errors that this package raises on purpose; a command ends with their `exit_code`."""

    exit_code = 1


class UserError(LezoError):
    """Bad input: a config value, a file, a command line. One line, exit code 2.

    Args:
        what: what is wrong, naming the key, file or record.
        got: the offending value, shown with repr unless it is a string.
        expected: what would have been valid.
        fix: what the user can do.

    >>> print(UserError("zo.sparsity is too large", got=1.5, expected="0 to 1", fix="set zo.sparsity=0.75"))
    zo.sparsity is too large; got: 1.5; expected: 0 to 1; fix: set zo.sparsity=0.75
    """

    exit_code = 2

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the message, which is the only state: ranks exchange errors."""
        return _restore, (str(self),)

    def __init__(self, what: str, *, got: object = None, expected: str = "", fix: str = "") -> None:
        parts = [what]
        if got is not None:
            parts.append(f"got: {got if isinstance(got, str) else repr(got)}")
        if expected:
            parts.append(f"expected: {expected}")
        if fix:
            parts.append(f"fix: {fix}")
        super().__init__("; ".join(parts))


def _restore(message: str) -> UserError:
    return UserError(message)


class HubError(UserError):
    """The hub cannot provide a model or a data set now; it may later, or from another machine."""


class JournalError(LezoError):
    """The journal cannot be written, or its content cannot be trusted."""

    exit_code = 3


class DivergenceError(LezoError):
    """Too many consecutive steps were skipped because their losses were not finite, or were outliers."""

    exit_code = 4


class DesyncError(LezoError):
    """The ranks work on different inputs, or the weights of a rank are not those of the run."""

    exit_code = 5


class LostRankError(LezoError):
    """A rank has ended, or has not answered in time."""

    exit_code = 6
