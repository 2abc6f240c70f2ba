"""What a key accepts beyond its type; written as `Annotated[type, ...]` in the schema."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

Option = float | int | bool | str
"""The value of one option of a component."""


@dataclass(frozen=True)
class Range:
    """The numbers that a key accepts.

    Attributes:
        minimum: the smallest number.
        maximum: the largest number; None for no limit.
        above: whether the minimum itself is excluded.
    """

    minimum: int
    maximum: int | None = None
    above: bool = False

    def __contains__(self, value: float) -> bool:
        if value < self.minimum or (self.above and value == self.minimum):
            return False
        return self.maximum is None or value <= self.maximum

    def __str__(self) -> str:
        if self.maximum is not None:
            return f"{self.minimum} to {self.maximum}"
        return f"{'above' if self.above else 'at least'} {self.minimum}"


@dataclass(frozen=True)
class Choices:
    """The values of a text key are the names in a registry. Upper and lower case are the same.

    Attributes:
        names: the registry, or its names. It is looked at whenever a value is read: later entries count.
    """

    names: Collection[str]


@dataclass(frozen=True)
class OptionsOf:
    """The key is an open section: it holds the options of a component that another key names.

    A configuration that was read holds every option of its component, with defaults filled in.

    Attributes:
        chooser: the key, in the same section, that names the component.
        defaults: maps the component's name to the default value of each of its options, by name. A value
            must have the type of its default.
    """

    chooser: str
    defaults: Callable[[str], Mapping[str, Option]]
