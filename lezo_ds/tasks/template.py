r"""Templates: texts with the fields of a record in braces, such as "{text}\nThis ticket is about".

A template becomes pieces, each a text and the field after it:

    "{title}: {body.text} today"   ->   ("", title)  (": ", body.text)  (" today", None)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from typing import Any, TypeVar

from lezo_ds.errors import UserError, cut
from lezo_ds.tasks.base import Record

T = TypeVar("T")

_SHOWN_CHARACTERS = 80
_BRACES = re.compile(r"""\{\{|\}\}|\{(?P<field>[^{}]*|[^{}"]*\{[^{}"]*\}[^{}"]*)\}|[{}]""")
_NO_NAME = re.compile(r"""[^!:]*(![rsa](:.*)?|:[^\w ]*\d*\W?\d*\w?)|".*:.*""", re.DOTALL)
"""What is in braces as in {text!r:>9} or {score:.2f}, and in {"key": 1}."""


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

    def fill_prompt(self, record: Record) -> str:
        """Return the prompt of a record. UserError: all its fields are empty texts."""
        if self._is_blank(record):
            raise UserError(f"no text is in {', '.join(self.fields)}", fix="fill it in")
        return self.fill(record)

    def fill(self, record: Record) -> str:
        """Return the text of a record. UserError: a field has neither text nor a number."""
        filled = ""
        for text, field in self.pieces:
            filled += text
            if field is not None:
                filled += field_text(field, field_value(record, field))
        return filled

    def only_value(self, record: Record) -> Any:
        """Return what a record holds in the field that is the whole template; None if none is."""
        if len(self.pieces) > 1 or not self.fields or self.pieces[0][0]:
            return None
        return field_value(record, self.fields[0])

    def texts(self, record: Record) -> list[str]:
        """Return the texts of a record: several if it is just one field, which holds a list.

        If all fields are empty, the text is empty: in "(B) {B}", the letter alone is no choice.
        """
        values = self.only_value(record)
        if isinstance(values, list):
            return [field_text(self.fields[0], value) for value in values]
        return [""] if self._is_blank(record) else [self.fill(record)]

    def _is_blank(self, record: Record) -> bool:
        """Return whether there are fields, and all of them are empty texts."""
        values = [field_value(record, field) for field in self.fields]
        are_blank = [isinstance(value, str) and not value.strip() for value in values]
        return bool(values) and all(are_blank)


def parse_template(key: str, text: str) -> Template:
    """Return the template in the value of a recipe key.

    A name may have braces in pairs, and any other characters, unless Python would read it as a
    conversion or a format, or JSON as an object.

    Raises:
        UserError: braces hold more than the plain name of a field, or one of a pair is missing.
    """
    pieces: list[tuple[str, str | None]] = []
    literal = ""
    end = 0
    for found in _BRACES.finditer(text):
        literal += text[end : found.start()]
        end = found.end()
        field = found["field"]
        if found[0] in ("{{", "}}"):
            literal += found[0][0]
        elif field is None:
            raise _not_a_template(key, text, "a brace without its pair")
        elif not field or field != field.strip() or _NO_NAME.fullmatch(field):
            raise _not_a_template(key, text, "braces without the plain name of a field")
        else:
            pieces.append((literal, field))
            literal = ""
    literal += text[end:]
    if literal:
        pieces.append((literal, None))
    return Template(tuple(pieces))


def _not_a_template(key: str, text: str, problem: str) -> UserError:
    return UserError(
        f"{key}={text!r} is not a template: {problem}",
        fix="write a field as {text}, and braces as {{ and }}; "
        "rename one with : or ! or outer spaces",
    )


def after(prompt: str, text: str) -> str:
    """Return a text as it continues a prompt: after a space, unless white space is between them."""
    if prompt[-1:].isspace() or text[:1].isspace():
        return text
    return f" {text}"


def readable(read: Callable[[Record], T], records: Iterable[Record]) -> Iterator[T]:
    """Yield what records hold. Others are refused, with their places, when they are built."""
    for record in records:
        try:
            yield read(record)
        except (KeyError, TypeError, UserError):
            continue


def field_value(record: Record, field: str) -> Any:
    """Return what a record holds in a field. KeyError or TypeError: it has no such field."""
    if field in record:  # a column of a table may have a dot in its name
        return record[field]
    value: Any = record
    for name in field.split("."):
        value = value[name]
    return value


def field_text(field: str, value: object) -> str:
    """Return a value as text: numbers, dates and times as Python writes them, and true or false."""
    if isinstance(value, bool):
        return str(value).lower()
    is_nan = value != value  # the empty cell of pandas
    if isinstance(value, str | int | float | Decimal | date | time) and not is_nan:
        return str(value)
    raise UserError(
        f"field {field} is {shown(value)}, not text or a number",
        fix='fill it in with a text ("" if there is none), or use another field',
    )


def shown(value: object) -> str:
    """Return the value of a field as an error shows it."""
    text = "null" if value is None else repr(value)
    return cut(text, _SHOWN_CHARACTERS)
