"""What the fields of a file hold: free text, numbers, a few labels or lists."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lezo_ds.tasks.base import Record
from lezo_ds.tasks.template import field_text

_MAX_DEPTH = 3
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")
_NOT_IN_TEMPLATES = re.compile(r"[{}!:]|^\s|\s$|^$")
_TRUTH = frozenset({"true", "false", "yes", "no"})


@dataclass(frozen=True)
class Column:
    """One field of all records; a nested field has a dotted name.

    Attributes:
        name: its name, as a recipe spells it.
        num_records: number of records of the file.
        values: the values that are neither null, nor empty, nor missing.
        num_present: number of records in which the field is neither null nor missing. An empty text counts.
    """

    name: str
    num_records: int
    values: tuple[object, ...]
    num_present: int

    @property
    def words(self) -> tuple[str, ...]:
        """The words of its name: is_urgent, isUrgent and "Is urgent" all have is and urgent."""
        spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", self.name)
        return tuple(word for word in re.split(r"[\W_]+", spaced.lower()) if word)

    @property
    def title(self) -> str:
        """Its name as a heading: "Ticket text" for ticket_text, without the name of its section."""
        last = self.name.rpartition(".")[2]
        words = re.sub(r"[_\s-]+", " ", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", last)).strip()
        return words[:1].upper() + words[1:]

    @property
    def is_complete(self) -> bool:
        """Whether every record has it."""
        return self.num_present == self.num_records

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Its values as text; empty if one of them is a list or a section."""
        if not all(isinstance(value, str | int | float) for value in self.values):
            return ()
        return tuple(field_text(self.name, value).strip() for value in self.values)

    @cached_property
    def counts(self) -> Counter[str]:
        """How often each text occurs."""
        return Counter(self.texts)

    @cached_property
    def is_number(self) -> bool:
        """Whether all values are numbers, also if they are written as text, as in a table."""
        return bool(self.texts) and all(map(_NUMBER.fullmatch, self.counts))

    @property
    def is_truth(self) -> bool:
        """Whether all values are true or false, or yes or no."""
        return bool(self.texts) and {text.lower() for text in self.counts} <= _TRUTH

    @cached_property
    def mean_length(self) -> float:
        """Mean number of characters."""
        return sum(map(len, self.texts)) / max(1, len(self.texts))

    @cached_property
    def is_free_text(self) -> bool:
        """Whether it holds sentences: several words of letters, and rarely the same ones."""
        texts, num_distinct = self.texts, len(self.counts)
        if not texts or self.is_number or (num_distinct <= 20 and num_distinct <= len(texts) / 2):
            return False
        if sum("://" in text or "@" in text for text in texts) > len(texts) / 2 and self.mean_length < 100:
            return False
        letters = sum(sum(map(str.isalpha, text)) for text in texts)
        if letters < 0.5 * sum(len(text) - text.count(" ") for text in texts):
            return False
        num_words = sum(len(text.split()) for text in texts) / len(texts)
        ascii_share = sum(map(str.isascii, texts)) / len(texts)
        return num_words >= 2 or (ascii_share < 0.5 and self.mean_length >= 8)  # some scripts have no spaces

    @cached_property
    def text_lists(self) -> tuple[list[str], ...]:
        """Its values, if all of them are lists of texts; otherwise empty."""
        lists = [value for value in self.values if isinstance(value, list)]
        are_texts = all(lists) and all(isinstance(text, str) for value in lists for text in value)
        return tuple(lists) if len(lists) == len(self.values) and are_texts else ()

    @cached_property
    def is_messages(self) -> bool:
        """Whether each value is a list of messages, which have a role and a content."""
        return bool(self.values) and all(
            isinstance(value, list)
            and value
            and all(isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in value)
            for value in self.values
        )


def read_columns(records: Sequence[Record]) -> tuple[list[Column], list[str]]:
    """Return the fields of all records, in their order, and the names that no template takes."""
    names: dict[str, list[object]] = {}
    unusable: dict[str, None] = {}
    for record in records:
        for name, value in _fields(record, "", unusable):
            names.setdefault(name, []).append(value)
    columns = []
    for name, values in names.items():
        filled = tuple(value for value in values if value is not None and value != "" and value != [])
        num_present = sum(value is not None for value in values)
        if filled:
            columns.append(Column(name, len(records), filled, num_present))
    return columns, list(unusable)


def _fields(
    record: Mapping[str, object], prefix: str, unusable: dict[str, None]
) -> Iterator[tuple[str, object]]:
    for name, value in record.items():
        if _NOT_IN_TEMPLATES.search(name) or ("." in name and prefix):
            unusable[prefix + name] = None
        elif isinstance(value, Mapping) and "." not in name and prefix.count(".") < _MAX_DEPTH:
            yield from _fields(value, f"{prefix}{name}.", unusable)
        else:
            yield prefix + name, value
