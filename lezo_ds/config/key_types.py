"""Types of keys that pydantic does not have, for the dataclasses in `schema`."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator
from typing import Annotated

from annotated_types import GroupedMetadata
from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from lezo_ds.registry import names_code


class Named(GroupedMetadata):
    """Restricts a string to names of components, in any case, or `package.module:name`.

    It is used as in `Annotated[str, Named(ESTIMATORS)]`.

    Args:
        registry: The components.
        others: Further names that are allowed.
    """

    def __init__(self, registry: Collection[str], *others: str) -> None:
        self._names = [*registry, *others]

    def __iter__(self) -> Iterator[object]:
        """Yield what pydantic applies to the string."""
        yield AfterValidator(self._checked)
        yield WithJsonSchema({"type": "string", "enum": [*self._names, "package.module:name"]})

    def _checked(self, value: str) -> str:
        # A module that a value names is imported only when the component is needed.
        if names_code(value):
            return value
        if value.lower() in self._names:
            return value.lower()
        raise ValueError(value)


def split(value: object) -> object:
    """Return the texts between the commas of a string, and a list with its numbers as strings.

    Other values stay as they are, and pydantic refuses them.
    """
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    if isinstance(value, list):
        return [str(item) if type(item) in (int, float) else item for item in value]
    return value


def _in_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Strings = Annotated[list[str], BeforeValidator(split)]
"""A list, or one string with commas between the items."""

ExactStrings = Annotated[list[str], BeforeValidator(_in_list)]
"""A list, or one string, which may hold commas."""


def _day(value: str) -> str:
    return datetime.date.fromisoformat(value).isoformat()


Day = Annotated[
    str,
    AfterValidator(_day),
    WithJsonSchema({"type": "string", "enum": ["YYYY-MM-DD"]}),
]
"""A day, such as 2026-01-31."""
