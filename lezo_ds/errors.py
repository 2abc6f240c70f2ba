"""One family of errors: each says what is wrong, what was got, what was expected, and the fix."""

from __future__ import annotations


class LezoError(Exception):
    """Base of every error this package raises on purpose; `exit_code` is what the commands end with."""

    exit_code = 1


class UserError(LezoError):
    """Bad input: a config value, a file, a command line. One line, exit code 2.

    Args:
        what: what is wrong, naming the key, file or record.
        got: the offending value, shown with repr unless it is a string.
        expected: what would have been right.
        fix: what to do about it.

    >>> print(UserError("zo.sparsity is too large", got=1.5, expected="0 to 1", fix="set zo.sparsity=0.75"))
    zo.sparsity is too large; got: 1.5; expected: 0 to 1; fix: set zo.sparsity=0.75
    """

    exit_code = 2

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as made: the message is the only state, and ranks exchange errors."""
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
    """The hub does not give a model or a data set now; it may at another time or place."""


class JournalError(LezoError):
    """The journal cannot be written, or what it holds cannot be trusted."""

    exit_code = 3


class DivergenceError(LezoError):
    """Too many steps in a row were skipped: their losses were not finite, or outliers."""

    exit_code = 4


class DesyncError(LezoError):
    """The ranks do not work on the same thing, or a rank's weights are not those of the run."""

    exit_code = 5


class LostRankError(LezoError):
    """A rank has ended, or has not answered in time."""

    exit_code = 6
