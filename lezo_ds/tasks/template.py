r"""Templates: texts with the fields of a record in braces, such as "{text}\nThis ticket is about"."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass

from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Record


@dataclass(frozen=True)
class Template:
    """A text with fields, as a recipe writes it: {name} stands for a field, {{ and }} for braces.

    A dot leads into a nested field. Unlike `str.format`, a template reads nothing but the record.

    Attributes:
        parts: pairs of a text and the field that follows it, which is None at the end of the template.
    """

    parts: tuple[tuple[str, str | None], ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of its fields, each once."""
        return tuple(dict.fromkeys(field for _, field in self.parts if field is not None))

    @property
    def only_field(self) -> str | None:
        """The field, if the template consists of one field and nothing else; otherwise None."""
        return self.parts[0][1] if len(self.parts) == 1 and not self.parts[0][0] else None

    @property
    def empty(self) -> str:
        """The text of the template if all fields are empty."""
        return "".join(text for text, _ in self.parts)

    def fill(self, record: Record) -> str:
        """Return the text of a record.

        Raises:
            UserError: a field is null, a list or a section.

        >>> template = parse_template("data.prompt", "{title}: {sizes.small} {{m}}")
        >>> template.fill({"title": "A", "sizes": {"small": 3}})
        'A: 3 {m}'
        """
        return "".join(
            text + ("" if field is None else field_text(field, field_value(record, field)))
            for text, field in self.parts
        )


def parse_template(key: str, text: str) -> Template:
    """Return the template that a text stands for.

    Args:
        key: the recipe key that holds it, as messages call it.
        text: the template.

    Raises:
        UserError: the braces do not match, or hold something else than the name of a field.
    """
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UserError(
            f"{key} is not a template",
            got=f"{text!r} ({error})",
            expected="text with the names of fields in braces, such as {text}",
            fix="close each brace, and write {{ and }} for braces that are part of the text",
        ) from error
    parts = []
    for literal, field, options, conversion in pieces:
        if field is not None and (not field or field != field.strip() or options or conversion):
            found = f"{field}{f'!{conversion}' if conversion else ''}{f':{options}' if options else ''}"
            raise UserError(
                f"{key} has braces without the plain name of a field",
                got="{" + found + "}",
                expected="the name of a field in braces, such as {text}",
                fix="write the name of a field, or {{ and }} for braces that are part of the text",
            )
        parts.append((literal, field))
    return Template(tuple(parts))


def field_path(record: Record, field: str) -> list[str]:
    """Return the names that lead to a field, from the outside in.

    A dot leads into a nested field, unless the record has a field with the whole name, as tables may have.
    """
    return [field] if field in record else field.split(".")


def field_value(record: Record, field: str) -> object:
    """Return the value of a field (see `field_path`), which must be there."""
    value: object = record
    for part in field_path(record, field):
        assert isinstance(value, Mapping)
        value = value[part]
    return value


def field_text(field: str, value: object) -> str:
    """Return a value as text: numbers as Python writes them, and true or false.

    Raises:
        UserError: it is null, a list or a section.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise UserError(
        f"field {field} is not a single value",
        got="null" if value is None else repr(value)[:80],
        expected="text or a number",
        fix="fill in the field, or use another field",
    )
