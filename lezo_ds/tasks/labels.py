r"""What a record's label is: one spelling for each, and the choice that a label names.

Tables, JSON and parquet hold the same label as different values. A column of integers becomes one
of floats where a cell is empty, and a table has text only:

    0   0.0   "0"   [0]                 ->  "0"
    true                                ->  "true", which is the same label as "True"
    "cafe\u0301"   "caf\u00e9"            ->  "caf\u00e9"
    "very\u00a0 good"   "very good\u200b"  ->  "very good"
    null   NaN   "NaN"   ""   []        ->  no label
"""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lezo_ds.errors import UserError, cut, did_you_mean
from lezo_ds.tasks.template import field_text, shown

logger = logging.getLogger(__name__)

_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]{0,17}))(?:\.0+)?")
"""A whole number, also with a point. 007 is no number, but a code."""
_INVISIBLE = re.compile("[\u200b\u2060\ufeff]")
_LETTER = re.compile(r"(\W*)([A-Za-z])(\W*)")
"""A letter that numbers a choice: A, b, (C) or D."""


def label_text(field: str, value: object) -> str | None:
    """Return a label in the spelling that is common to all its values (see the module's docstring).

    Args:
        field: the name of the field, for messages.
        value: what the record holds in it.

    Returns:
        The label with single spaces within; None if the record has none.

    Raises:
        UserError: the value is neither a text nor a number, nor a list of one.
    """
    if isinstance(value, list) and len(value) < 2:
        value = value[0] if value else None
    if value is None or value != value:  # only NaN differs from itself
        return None
    text = unicodedata.normalize("NFC", _INVISIBLE.sub("", field_text(field, value)))
    text = " ".join(text.split())
    if text.lower() == "nan":
        return None
    number = _WHOLE.fullmatch(text)
    return str(int(number[1])) if number else text or None


def label_key(text: str) -> str:
    """Return what all spellings of a label have in common, given one of them."""
    label = label_text("data.labels", text) or text
    return label.lower() if label.lower() in ("true", "false") else label


class Labels:
    """The labels of a recipe, among which those of records are found.

    Args:
        names: the labels as the recipe writes them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        places: dict[str, int] = {}
        for place, name in enumerate(names):
            places.setdefault(label_key(name), place)
        # What a recipe writes counts first, such as a label NaN.
        self._places = places | {name: place for place, name in enumerate(names)}

    def find(self, field: str, value: object) -> int | None:
        """Return the index of a record's label; None if the record has no label.

        Raises:
            UserError: the label is none of these.
        """
        if isinstance(value, str) and value in self._places:
            return self._places[value]
        text = label_text(field, value)
        if text is None:
            return None
        key = label_key(text)
        if key in self._places:
            return self._places[key]
        otherwise = "correct the record, or add it to data.labels"
        if text.isdecimal() and int(text) < len(self._names):
            pairs = ", ".join(f"{place}: {name}" for place, name in enumerate(self._names))
            otherwise = f"say which label each number is, as in data.labels={{{cut(pairs, 200)}}}"
        raise UserError(
            f"field {field} is {shown(text)}, which is none of data.labels: "
            f"{cut(', '.join(self._names), 200)}",
            fix=did_you_mean(text, self._names, otherwise),
        )


def warn_of_merged(field: str, labels: Iterable[tuple[str | None, object]]) -> None:
    """Say which values of a field count as one label though they are written differently.

    Args:
        field: the name of the field.
        labels: the label of each record, and the value that it has in the record.
    """
    spellings: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for label, value in labels:
        if label is not None and not isinstance(value, list):
            spellings[label_key(label)][str(value).strip()] += 1
    for counts in spellings.values():
        if len(counts) > 1:
            found = ", ".join(f"{text!a} ({number})" for text, number in counts.most_common())
            logger.warning("in field %s, these are one label (records): %s", field, found)


class Choice(NamedTuple):
    """The texts that a record gives to choose from.

    Attributes:
        texts: the texts.
        label: the `label_text` that says which is right; None if there is none.
        is_integer: whether the record holds the label as an integer.
        names: what the record itself calls each text; () if it does not say.
    """

    texts: Sequence[str]
    label: str | None
    is_integer: bool
    names: Sequence[str] = ()

    @property
    def place(self) -> int | None:
        """The index of the text that the label names or is, if only its case is another one."""
        if self.label is None:
            return None
        if self.label in self.names:
            return self.names.index(self.label)
        label = label_key(self.label)
        texts = list(map(label_key, self.texts))
        if label not in texts:
            label = label.casefold()
            texts = list(map(str.casefold, texts))
        return texts.index(label) if label in texts else None


def find_choice(field: str, choice: Choice, *, are_numbers: bool) -> int | None:
    """Return the index of the right text from its number, which begins at 0, or from the text.

    Args:
        field: the name of the label field, for messages.
        choice: the texts and the label of a record.
        are_numbers: whether labels are numbers, or else texts (`labels_are_numbers`).

    Returns:
        The index, which is out of range if the number is; None if the record has no label.

    Raises:
        UserError: the label is something else.
    """
    label = choice.label
    if label is None or label in choice.names:
        return choice.place
    found = choice.place
    expected = f"one of the choices {shown(choice.texts)}"
    if are_numbers:
        found = int(label) if _WHOLE.fullmatch(label) else None
        expected = "the number of a choice, from 0, as other records have"
    if found is None:
        raise UserError(
            f"field {field} is {shown(label)}, not {expected}",
            fix="correct the record, or list in data.labels what the field holds for the first, "
            "second, ... choice",
        )
    return found


_TEXT = "text"
_FROM_0 = "0"
_FROM_1 = "1"


def labels_that_read(choices: Sequence[Choice]) -> tuple[list[int] | list[str] | None, int]:
    """Return what data.labels must list to read most labels of records, and how many it reads.

    It is None if these are texts of choices, or numbers from 0, which count first.
    """
    counts = _count_readings(choices)
    best = max(counts, key=lambda way: (counts[way], way in (_TEXT, _FROM_0)), default=_TEXT)
    names = None if best in (_TEXT, _FROM_0) else _names(best, choices)
    return names, counts[best]


def labels_are_numbers(field: str, choices: Sequence[Choice]) -> bool:
    """Return whether the labels of choices are their numbers, from 0, and not their texts.

    One record is not enough: with the choices 3, 0, 2 and 1, the label 2 could be either. So the
    reading that fits more records wins. In a tie, integers are indices, and strings are texts.

    Raises:
        UserError: another reading fits more records, and data.labels has to say so.
    """
    names, number = labels_that_read(choices)
    if names is not None:
        raise UserError(
            f"field {field} numbers the choices of {number} of {len(choices)} records as "
            f"{names[0]}, ..., not from 0",
            fix=f"set data.labels={json.dumps(names)}",
        )
    counts = _count_readings(choices)
    is_tie = counts[_FROM_0] == counts[_TEXT]
    are_integers = all(choice.is_integer for choice in choices)
    are_numbers = counts[_FROM_0] > counts[_TEXT] or (is_tie and are_integers)
    if are_numbers and counts[_FROM_1] == counts[_FROM_0]:
        logger.warning(
            "no record has the number 0 or that of its last choice in field %s: numbers are taken "
            "to begin at 0; if they begin at 1, set data.labels=%s",
            field,
            _names(_FROM_1, choices),
        )
        return are_numbers
    both = [each for each in map(_readings, choices) if _TEXT in each and _FROM_0 in each]
    unlike = sum(each[_TEXT] != each[_FROM_0] for each in both)
    if unlike and is_tie:
        logger.warning(
            "%d labels in field %s may be the number of a choice or the text of another; they are "
            "taken for %s",
            unlike,
            field,
            "numbers; to take them for texts, write them as strings"
            if are_numbers
            else f"texts; to take them for numbers, set data.labels={_names(_FROM_0, choices)}",
        )
    return are_numbers


def _count_readings(choices: Sequence[Choice]) -> Counter[str]:
    """Return the number of records that each way to read a label fits."""
    return Counter(way for choice in choices for way in _readings(choice))


def _readings(choice: Choice) -> dict[str, int]:
    """Return each way to read the label of a choice, with the index that it gives.

    A way is _TEXT, or what the label of the first choice would be: 0, 1, A or (a).
    """
    readings = {}
    label = choice.label or ""
    if choice.place is not None:
        readings[_TEXT] = choice.place
    if label in choice.names:
        return readings
    if _WHOLE.fullmatch(label):
        for first in (_FROM_0, _FROM_1):
            readings[first] = int(label) - int(first)
    letter = _LETTER.fullmatch(label)
    if letter:
        before, name, after = letter.groups()
        first = "A" if name.isupper() else "a"
        readings[f"{before}{first}{after}"] = ord(name) - ord(first)
    return {way: index for way, index in readings.items() if 0 <= index < len(choice.texts)}


def _names(first: str, choices: Sequence[Choice]) -> list[int] | list[str]:
    """Return the labels of the first, second, ... choice, given that of the first."""
    places = range(max(len(choice.texts) for choice in choices))
    if first.isdecimal():
        return [int(first) + place for place in places]
    letter = "A" if "A" in first else "a"
    return [first.replace(letter, chr(ord(letter) + place)) for place in places]
