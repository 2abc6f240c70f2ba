"""The options of a component: what a recipe may set beyond what every component of its kind is given."""

from __future__ import annotations

import dataclasses
from typing import Any

from lezo_ds.errors import UserError

Option = float | int | bool | str
"""The value of an option."""


def options_of(component: type, kind: type) -> dict[str, Option]:
    """Return the default of each option of a component: its dataclass fields that its kind does not have.

    Args:
        component: a dataclass such as an estimator's; each field of its own has a default.
        kind: the base class of components of this kind.
    """
    common = {field.name for field in dataclasses.fields(kind)}
    own: tuple[Any, ...] = dataclasses.fields(component)
    return {field.name: field.default for field in own if field.name not in common}


def check_option(key: str, value: Option, valid: bool, *, expected: str, fix: str) -> None:
    """Refuse the value of an option unless it is valid.

    Args:
        key: dotted key of the option.
        value: its value.
        valid: whether the component can use it.
        expected: what it can use.
        fix: what to do.

    Raises:
        UserError: the value is not valid.
    """
    if not valid:
        raise UserError(f"{key} does not fit", got=value, expected=expected, fix=fix)
