"""Registries: components by name, or a component of the user's own as `package.module:Name`."""

from __future__ import annotations

import dataclasses
import pkgutil
import sys
from typing import Any, TypeVar

from lezo_ds.errors import UserError, did_you_mean

T = TypeVar("T")

FOLDERS: list[str] = []
"""Where modules are looked for after all others: the folder of the recipe."""


class Registry(dict[str, T]):
    """Components by lower-case name. Lookups ignore case.

    `what` a component is, and the configuration's `key` that names one, are for messages. One of the user's
    own must be an instance or a subclass of `kind`, or any function if that is None.
    """

    def __init__(self, what: str, key: str, kind: type | None = None) -> None:
        super().__init__()
        self._what, self._key, self._kind = what, key, kind

    def add(self, name: str, entry: T) -> None:
        """Register a component under a new lower-case name."""
        self[name] = entry

    def find(self, name: str) -> T:
        """Return the component of a name; `package.module:Name` is imported. UserError: there is none."""
        if names_code(name):
            return self._import(name)  # type: ignore[no-any-return]
        if name.lower() in self:
            return self[name.lower()]
        names = ", ".join(sorted(self))
        raise UserError(
            f"{self._key}={name} is not a registered {self._what} ({names}) or package.module:Name",
            fix=did_you_mean(name, self, f"set {self._key} to one of these"),
        )

    def _import(self, name: str) -> Any:
        added, kind = [folder for folder in FOLDERS if folder not in sys.path], self._kind
        sys.path += added
        try:
            component = pkgutil.resolve_name(name)
            if not (callable(component) if kind is None else _is_a(component, kind)):
                raise TypeError(
                    f"{component!r} is not {'callable' if kind is None else kind.__name__}"
                )
        except Exception as error:  # the module may raise anything
            raise UserError(
                f"{self._key}={name} names no {self._what}: {type(error).__name__}: {error}",
                fix="correct the name, or put the module in the recipe's folder or on PYTHONPATH",
            ) from error
        finally:
            sys.path[:] = [folder for folder in sys.path if folder not in added]
        return component


def names_code(name: str) -> bool:
    """Return whether a name has the form `package.module:Name`, so that finding it imports a module."""
    return ":" in name


def options_of(component: Any, kind: type) -> dict[str, Any]:
    """Return the defaults of a component's options: the dataclass fields that its base class lacks."""
    common = {field.name for field in dataclasses.fields(kind)}
    return {
        field.name: field.default
        for field in dataclasses.fields(component)
        if field.name not in common
    }


def _is_a(component: object, kind: type) -> bool:
    return (
        issubclass(component, kind) if isinstance(component, type) else isinstance(component, kind)
    )
