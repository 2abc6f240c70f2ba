"""A list that users meet, and that they can add to: entries by name, with an error that names them all."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TypeVar

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
