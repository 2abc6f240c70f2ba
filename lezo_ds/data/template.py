r"""Templates: texts with the fields of a record in braces, such as "{text}\nThis ticket is about".

A template becomes pieces, each a text and the field after it:

    "{title}: {body.text} today"   ->   ("", title)  (": ", body.text)  (" today", None)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lezo_ds.errors import UserError, cut

Record = Mapping[str, Any]
"""One row of a data set: values by column."""

_SHOWN_CHARACTERS = 80
_PARTS = re.compile(r"(\{\{|\}\}|\{[^{}]+\})")
"""Matches doubled braces and fields. The name of a column may have any character but braces."""


@dataclass(frozen=True)
class Template:
    """A text with fields: {name} or {section.name}.

    Unlike `str.format`, it reads nothing but the record: no attribute of a value, and no item.

    Attributes:
        pieces: each a text, and the field after it, which is None at the end of a template.
    """

    pieces: tuple[tuple[str, str | None], ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of its fields, each once."""
        return tuple(dict.fromkeys(field for _, field in self.pieces if field is not None))

    def fill(self, record: Record) -> str:
        """Return the text of a record. UserError: a field has no text."""
        filled = ""
        for text, field in self.pieces:
            filled += text
            if field is not None:
                filled += field_text(field, field_value(record, field))
        return filled

    def fill_given(self, record: Record) -> str:
        """Return the text of a record; "" if all its fields are null or empty.

        Raises:
            UserError: some of the fields have no text.
        """
        values = [field_value(record, field) for field in self.fields]
        if self.fields and all(value is None or not str(value).strip() for value in values):
            return ""
        return self.fill(record)

    def fill_prompt(self, record: Record) -> str:
        """Return the text of a record. UserError: all its fields are empty."""
        filled = self.fill_given(record)
        if not filled:
            columns = " and ".join(f"`{field}`" for field in self.fields)
            raise UserError(f"column {columns} is empty", fix="fill it in")
        return filled

    def texts(self, record: Record) -> list[str]:
        """Return the texts of a record: those of a list in its only field, or else one."""
        value = self.only_value(record)
        if isinstance(value, list):
            return [field_text(self.fields[0], each) for each in value]
        return [self.fill_given(record)]

    def only_value(self, record: Record) -> Any:
        """Return what a record holds in the field that is the whole template; None if none is."""
        is_whole = len(self.fields) == 1 and self.pieces == (("", self.fields[0]),)
        return field_value(record, self.fields[0]) if is_whole else None


def parse_template(key: str, text: str) -> Template:
    """Return the template in the value of a recipe key. UserError: one of two braces is missing."""
    pieces: list[tuple[str, str | None]] = []
    literal = ""
    for number, part in enumerate(_PARTS.split(text)):
        is_match = number % 2 == 1
        if is_match and part not in ("{{", "}}"):
            pieces.append((literal, part[1:-1]))
            literal = ""
        elif not is_match and ("{" in part or "}" in part):
            raise UserError(
                f"{key}={text!r} is not a template: it has one of two braces",
                fix="write a column as {text}, and braces as {{ and }}; rename a column whose name "
                "has braces",
            )
        else:
            literal += part[0] if is_match else part
    if literal:
        pieces.append((literal, None))
    return Template(tuple(pieces))


def field_template(key: str, text: str) -> Template:
    """Return the template in the value of a recipe key. UserError: it names no field."""
    template = parse_template(key, text)
    if not template.fields:
        raise UserError(
            f"{key}={text!r} does not name a column of the records",
            fix="put the name of a column in single braces, such as {text}",
        )
    return template


def after(prompt: str, text: str) -> str:
    """Return a text as it continues a prompt: after a space, unless white space is between them."""
    if prompt[-1:].isspace() or text[:1].isspace():
        return text
    return f" {text}"


def field_value(record: Record, field: str) -> Any:
    """Return what a record holds in a field. UserError: it has no such field."""
    if field in record:  # a column of a table may have a dot in its name
        return record[field]
    value: Any = record
    for name in field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            columns = ", ".join(map(str, record))
            raise UserError(
                f"there is no column {field}, only {columns}",
                fix="correct the names of columns in the recipe, or the first line of a table",
            )
        value = value[name]
    return value


def field_text(field: str, value: object) -> str:
    """Return a value as `str` writes it. UserError: it is missing, or a list or an object."""
    is_nan = value != value  # only NaN differs from itself
    if value is None or is_nan or isinstance(value, list | tuple | Mapping):
        raise UserError(
            f"column `{field}` is {shown(value)}, not a text or a number",
            fix='fill it in with a text ("" if there is none), or use another column',
        )
    return str(value)


def shown(value: object) -> str:
    """Return the value of a field as an error shows it."""
    text = "null" if value is None else repr(value)
    return cut(text, _SHOWN_CHARACTERS)
