"""Types of keys that pydantic does not have, for the dataclasses in `schema`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from lezo_ds.registry import names_code


class Named:
    """Restricts a string to names of components, in any case, or `package.module:name`.

    It is used as in `Annotated[str, Named(ESTIMATORS)]`. pydantic calls its methods.

    Args:
        registry: The components. Their names are read whenever a value or a help text needs them.
        others: Further names that are allowed.
    """

    def __init__(self, registry: Collection[str], *others: str) -> None:
        self._registry = registry
        self._others = others

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "enum": [*self._names(), "package.module:name"]}

    def _names(self) -> list[str]:
        return [*self._registry, *self._others]

    def _validate(self, value: str) -> str:
        # A module that a value names is imported only when the component is needed.
        if names_code(value):
            return value
        if value.lower() in self._names():
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
