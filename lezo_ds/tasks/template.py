r"""Templates: texts with the fields of a record in braces, such as "{text}\nThis ticket is about"."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

from lezo_ds.errors import UserError, cut
from lezo_ds.tasks.base import Record


@dataclass(frozen=True)
class Template:
    """A text with fields: {name} or {section.name}. Unlike `str.format`, it reads nothing but the record."""

    parts: tuple[tuple[str, str | None], ...]
    """Pairs of a text and the field after it, which is None at the end of the template."""

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(field for _, field in self.parts if field is not None))

    def fill(self, record: Record) -> str:
        return "".join(
            text + ("" if field is None else field_text(field, field_value(record, field)))
            for text, field in self.parts
        )

    def texts(self, record: Record) -> list[str]:
        """Return the texts of a record: several if the template is just one field, which holds a list."""
        if (
            len(self.parts) == 1
            and not self.parts[0][0]
            and (field := self.parts[0][1]) is not None
        ):
            values = field_value(record, field)
            if isinstance(values, list):
                return [field_text(field, value) for value in values]
        return [self.fill(record)]


def parse_template(key: str, text: str) -> Template:
    """Return the template in the value of a recipe key."""
    try:
        pieces = list(string.Formatter().parse(text))
        for _, field, options, conversion in pieces:
            if field is not None and (not field or field != field.strip() or options or conversion):
                raise ValueError("braces without the plain name of a field")
    except ValueError as error:
        fix = "write a field as {text}, and braces as {{ and }}; rename one with : or ! or outer spaces"
        raise UserError(f"{key}={text!r} is not a template: {error}", fix=fix) from error
    return Template(tuple((literal, field) for literal, field, _, _ in pieces))


def field_path(record: Record, field: str) -> list[str]:
    """Return the names that lead to a field; a column of a table may have a dot in its name."""
    return [field] if field in record else field.split(".")


def field_value(record: Record, field: str) -> Any:
    value: Any = record
    for part in field_path(record, field):
        value = value[part]
    return value


def field_text(field: str, value: object) -> str:
    """Return a value as text: numbers as Python writes them, and true or false."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    fix = "fill it in, or use another field"
    raise UserError(f"field {field} is {shown(value)}, not text or a number", fix=fix)


def shown(value: object) -> str:
    """Return the value of a field as an error shows it."""
    return cut("null" if value is None else repr(value), 80)
