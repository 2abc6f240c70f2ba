"""A list that users meet, and that they can add to: entries by name, with an error that names them all.

A user can also name something in a module of their own, as "package.module:name".
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from lezo_ds.errors import UserError

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Entries by name. Names are lower case; they are looked up in upper or lower case.

    Args:
        what: what an entry is, as messages call it.
        key: the recipe key that takes a name, as messages call it.

    >>> colors = Registry[int]("color", "paint.color")
    >>> colors.add("red", 1)
    >>> colors.find("Red")
    1
    """

    def __init__(self, what: str, key: str) -> None:
        self._what = what
        self._key = key
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> None:
        """Register an entry.

        Raises:
            ValueError: the name is taken, or is not lower case.
        """
        if name in self._entries or name != name.lower():
            raise ValueError(f"{self._what} {name!r} is registered already, or its name is not lower case")
        self._entries[name] = entry

    def find(self, name: str) -> T:
        """Return the entry of a name.

        Raises:
            UserError: there is none; the error names the nearest one.
        """
        if name.lower() in self._entries:
            return self._entries[name.lower()]
        near = difflib.get_close_matches(name.lower(), self._entries, n=1)
        raise UserError(
            f"unknown {self._what}",
            got=name,
            expected="one of " + ", ".join(sorted(self._entries)),
            fix=f"did you mean {near[0]}?" if near else f"set {self._key} to one of these",
        )

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def names_code(name: str) -> bool:
    """Return whether a name is of the form "package.module:name", so that finding it imports a module."""
    return ":" in name


def import_named(key: str, name: str, *, what: str, expected: str, kind: type | None = None) -> Any:  # noqa: ANN401
    """Import what "package.module:name" stands for.

    Args:
        key: the recipe key that takes the name, as messages call it.
        name: the name.
        what: what it should be, with its article, such as "an objective".
        expected: the names that the key accepts, in words.
        kind: the class that it must be an instance of; None for a function.

    Raises:
        UserError: there is no such module or name in it, or it is something else.
    """
    try:
        if not names_code(name):  # resolve_name would take it for a module
            raise ValueError(f"invalid format: {name!r}")
        found = pkgutil.resolve_name(name)
        if kind is None and not callable(found):
            raise TypeError(f"{found!r} is not a function")
        if kind is not None and not isinstance(found, kind):
            raise TypeError(f"{found!r} is not a {kind.__name__}")
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        raise UserError(
            f"{key}={name} does not name {what}",
            got=f"{type(error).__name__}: {error}",
            expected=expected,
            fix="correct the name, or add the folder of the module to PYTHONPATH",
        ) from error
    return found
