"""Guesses from the fields of a file what its task is: keys of the section `data`, and reasons in words.

The guesses are rules about names and values. Each states what it saw, so that a user can correct it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lezo_ds.errors import UserError
from lezo_ds.tools.first_recipe.columns import Column

MAX_LABELS = 50
"""A field with more different values is no label."""

_MAX_LABEL_LENGTH = 60
_MIN_EACH = 2.5  # records of a label, on average
_MAX_SHOWN = 6
_UNEVEN = 0.6  # share of the most frequent label


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LABEL_WORDS = _words(
    """label labels class category topic target sentiment intent emotion rating stars score polarity stance
    genre y gold answer toxic toxicity spam priority department type tag decision verdict outcome is has
    urgent subject_area severity status"""
)
_OTHER_WORDS = _words(
    """id idx index uid uuid split fold source url link date year month day time timestamp created updated
    user author annotator worker language lang locale country region age gender version count length num
    number confidence unnamed channel platform"""
)
_PLAIN_LABELS = frozenset({"label", "labels", "class", "target", "y", "gold", "category"})
_TEXT_WORDS = _words(
    """text sentence content body review question message comment premise hypothesis title subject headline
    description passage context document article tweet query utterance prompt instruction input dialogue
    story abstract statement claim sentence1 sentence2 text1 text2 question1 question2"""
)
_PROMPT_WORDS = _words(
    "prompt instruction input question context passage article document dialogue source query"
)
_COMPLETION_WORDS = (
    "completion response output answer answers target summary reply translation highlights chosen"
)
"""The likeliest first."""

_CHOICE_PREFIX = r"(?:(?:choice|option|ending|answer|alternative|candidate|sol)[ _-]?)?"
_CHOICE = re.compile(rf"{_CHOICE_PREFIX}([0-9]|[a-h])", re.IGNORECASE)
_CHOICE_LISTS = frozenset({"choices", "options", "endings", "alternatives", "candidates", "answers"})
_STARS = ("terrible", "bad", "okay", "good", "great")


@dataclass(frozen=True)
class Guess:
    """A task that a file may hold.

    Attributes:
        summary: the task in one line.
        data: keys of the section `data` and their values, without where the data is.
        notes: a comment for each of these keys that needs one.
        reasons: what the guess rests on, a sentence each.
        used: names of the fields that the task reads.
    """

    summary: str
    data: Mapping[str, Any]
    notes: Mapping[str, str]
    reasons: tuple[str, ...]
    used: tuple[str, ...]


def guess_task(
    columns: Sequence[Column], *, label: str | None = None, names: Mapping[str, Sequence[str]] | None = None
) -> Guess:
    """Return the likeliest task of a file.

    Args:
        columns: its fields.
        label: the field with the right answer, if the user has named it.
        names: names of the values of numbered labels, by field, if the file holds them.

    Raises:
        UserError: no rule fits; or there is no field of the name `label`.
    """
    chat = next((column for column in columns if column.is_messages), None)
    if chat is not None and label is None:
        return _chat(chat)
    answer = _named(columns, label)
    candidates = [answer] if answer is not None else _labels(columns)
    found = _multiple_choice(columns, candidates)
    if found is None and (answer is None or not _is_label(answer)):
        found = _generation(columns, answer, label=candidates[0] if candidates and answer is None else None)
    if found is None and candidates and _is_label(candidates[0]):
        found = _classification(columns, candidates[0], (names or {}).get(candidates[0].name))
    if found is None:
        shown = ", ".join(column.name for column in columns[:20])
        raise UserError(
            "the file does not show which field the model shall learn to write",
            got=f"the fields {shown or 'none'}" + ("" if label is None else f", and --label {label}"),
            expected=f"a field of text, and one with 2 to {MAX_LABELS} different labels, or with answers",
            fix="name the field with the right answer: --label FIELD",
        )
    return found


def _named(columns: Sequence[Column], label: str | None) -> Column | None:
    found = [column for column in columns if column.name == label]
    if label is not None and not found:
        raise UserError(
            "--label names no field of the file",
            got=label,
            expected=f"one of {', '.join(column.name for column in columns[:20])}",
            fix="correct --label, or leave it out",
        )
    return found[0] if found else None


def _chat(column: Column) -> Guess:
    return Guess(
        summary=f"chat: the messages in {column.name}",
        data={"messages": column.name},
        notes={},
        reasons=(f"{column.name} holds lists of messages with a role and a content.",),
        used=(column.name,),
    )


def _is_label(column: Column) -> bool:
    counts = column.counts
    is_short = all(len(text) <= _MAX_LABEL_LENGTH for text in counts)
    is_whole = not column.is_number or all(float(text).is_integer() for text in counts)
    enough = sum(counts.values()) >= _MIN_EACH * len(counts)
    return 2 <= len(counts) <= MAX_LABELS and is_short and is_whole and enough


def _labels(columns: Sequence[Column]) -> list[Column]:
    """Return the fields that may be a label, the likeliest first."""
    scored = [
        (_label_score(column, index == len(columns) - 1), index) for index, column in enumerate(columns)
    ]
    likely = [(score, index) for score, index in scored if _is_label(columns[index]) and score > -3]
    return [columns[index] for _, index in sorted(likely, reverse=True)]


def _label_score(column: Column, is_last: bool) -> int:
    words = set(column.words)
    score = (
        4 * bool(words & _LABEL_WORDS)
        + 2 * bool(words & {"label", "labels"})
        - 5 * bool(words & _OTHER_WORDS)
    )
    score += is_last - 2 * column.is_free_text
    return score + (not column.is_number) - (column.is_number and len(column.counts) > 10)


def _texts(columns: Sequence[Column], without: Sequence[str]) -> tuple[list[Column], list[Column]]:
    """Return the fields of text that a prompt shows, in the order of the file, and the other ones."""
    free = [column for column in columns if column.is_free_text and column.name not in without]
    if not free:
        # Names, products or single words: the field with the most different texts is better than none.
        rest = [c for c in columns if c.texts and not c.is_number and c.name not in without and c.is_complete]
        free = sorted(rest, key=lambda column: len(column.counts))[-1:]
    named = [column for column in free if set(column.words) & _TEXT_WORDS and column.is_complete]
    shown = named[:3] or sorted(free, key=lambda column: column.mean_length)[-1:]
    return shown, [column for column in free if column not in shown]


def _prompt(texts: Sequence[Column], cue: str) -> str:
    if len(texts) == 1:
        return f"{{{texts[0].name}}}\n{cue}:"
    return "".join(f"{column.title}: {{{column.name}}}\n" for column in texts) + f"{cue}:"


def _about_texts(texts: Sequence[Column], others: Sequence[Column]) -> tuple[str, ...]:
    listed = " and ".join(column.name for column in texts)
    found = [f"{listed} {'holds' if len(texts) == 1 else 'hold'} the text: {_length(texts)}."]
    if others:
        more = ", ".join(f"{{{column.name}}}" for column in others[:_MAX_SHOWN])
        found.append(f"More text that the prompt could show: {more}.")
    return tuple(found)


def _length(texts: Sequence[Column]) -> str:
    return f"{sum(column.mean_length for column in texts):.0f} characters on average"


def _classification(columns: Sequence[Column], label: Column, names: Sequence[str] | None) -> Guess | None:
    texts, others = _texts(columns, [label.name])
    if not texts:
        return None
    counts = label.counts
    shown = ", ".join(f"{text} ({count})" for text, count in counts.most_common(_MAX_SHOWN))
    shown += f" and {len(counts) - _MAX_SHOWN} more" if len(counts) > _MAX_SHOWN else ""
    verbalizers, note = _verbalizers(label, names)
    plain = set(label.words) <= _PLAIN_LABELS
    cue = ("Category" if len(texts) == 1 else "Answer") if plain else label.title
    if label.is_truth:
        cue = f"{label.title} (yes or no)"
    data: dict[str, Any] = {"prompt": _prompt(texts, cue), "label_field": label.name, "labels": verbalizers}
    notes = {"prompt": "the model reads this, and then each label's text: word it as a person would"}
    notes["labels"] = note
    if (most := max(counts.values()) / sum(counts.values())) > _UNEVEN:
        data["metric"] = "macro_f1"
        notes["metric"] = f"{100 * most:.0f} % of the records have the same label, so accuracy says little"
    reasons = [
        f"{label.name} is the label: {len(counts)} different values in {label.num_records} records: {shown}."
    ]
    if label.num_records > len(label.values):
        reasons.append(f"{label.num_records - len(label.values)} records have no label and are left out.")
    return Guess(
        summary=f"classification of {label.name} from {' and '.join(column.name for column in texts)}",
        data=data,
        notes=notes,
        reasons=(*reasons, *_about_texts(texts, others)),
        used=(label.name, *(column.name for column in texts)),
    )


def _verbalizers(label: Column, names: Sequence[str] | None) -> tuple[list[str] | dict[str, str], str]:
    """Return the labels and the text that stands for each, and a comment on where the texts come from."""
    values = sorted(label.counts, key=lambda text: (float(text) if label.is_number else 0, text))
    if (
        label.is_number
        and names
        and all(float(v).is_integer() and 0 <= int(float(v)) < len(names) for v in values)
    ):
        found = {value: _readable(names[int(float(value))]) for value in values}
        if len(set(found.values())) == len(values):
            return found, "the names that the file gives to the numbers"
    if label.is_truth:
        found = {value: "yes" if value.lower() in ("true", "yes") else "no" for value in values}
        if len(set(found.values())) == len(values):
            return found, "each value of the field, and the text that stands for it"
    if label.is_number:
        numbers = [float(value) for value in values]
        if numbers == [1, 2, 3, 4, 5] and set(label.words) & {"rating", "stars", "score", "review"}:
            return dict(zip(values, _STARS, strict=True)), "words for one to five stars"
        if numbers == [0, 1] and not set(label.words) <= _PLAIN_LABELS:
            return dict(zip(values, ("no", "yes"), strict=True)), "a guess: 1 means yes"
        same = dict(zip(values, values, strict=True))
        return (
            same,
            "WRITE A WORD FOR EACH NUMBER: a model knows words such as great, but not what 1 means here",
        )
    readable = [_readable(value) for value in values]
    if readable == values or len(set(readable)) < len(values) or not all(readable):
        return values, "a map, such as {bug: a fault}, gives each label another text"
    return dict(
        zip(values, readable, strict=True)
    ), "each value of the field, and the text that stands for it"


def _readable(text: str) -> str:
    return " ".join(text.replace("_", " ").split())


def _multiple_choice(columns: Sequence[Column], candidates: Sequence[Column]) -> Guess | None:
    lists = [
        column
        for column in columns
        if column.text_lists
        and set(column.words) & _CHOICE_LISTS
        and min(map(len, column.text_lists)) >= 2
        and column.is_complete
    ]
    found = {
        m[1].lower(): c for c in columns if c.texts and (m := _CHOICE.fullmatch(c.name)) and c.is_complete
    }
    if lists:
        choices, size = lists[:1], max(map(len, lists[0].text_lists))
    elif len(found) >= 2:
        choices, size = [found[mark] for mark in sorted(found)], len(found)
    else:
        return None
    names = [column.name for column in choices]
    for label in (*candidates, *columns):
        numbering = None if label.name in names else _numbering(label, size, choices)
        texts, others = _texts(columns, [label.name, *names])
        if numbering is None or not texts:
            continue
        data: dict[str, Any] = {
            "prompt": _prompt(texts, "Answer"),
            "choices": [f"{{{name}}}" for name in names],
            "label_field": label.name,
        }
        if numbering:
            data["labels"] = numbering
        reasons = (
            f"{', '.join(names)} {'holds' if len(names) == 1 else 'hold'} the choices, and {label.name} "
            "says which one is right.",
        )
        return Guess(
            summary=f"multiple choice: {label.name} names one of {', '.join(names)}",
            data=data,
            notes={"labels": "the values of the field, in the order of the choices"} if numbering else {},
            reasons=(*reasons, *_about_texts(texts, others)),
            used=(label.name, *names, *(column.name for column in texts)),
        )
    return None


def _numbering(label: Column, size: int, choices: Sequence[Column]) -> list[str] | None:
    """Return the labels of the choices; an empty list if they are numbers from 0 or texts of the choices.

    None stands for a field that does not say which choice is right.
    """
    values = set(label.counts)
    if not values or len(values) < 2:
        return None
    from_zero, from_one = ([str(i + start) for i in range(size)] for start in (0, 1))
    if values <= set(from_zero):
        return []
    letters = [chr(ord("A") + i) for i in range(size)]
    names = [column.name for column in choices]
    for numbering in (from_one, letters, [letter.lower() for letter in letters], names):
        if values <= set(numbering):
            return numbering
    offered = {text for column in choices for texts in column.text_lists for text in texts}
    offered |= {text for column in choices for text in column.texts}
    return [] if values <= offered else None


def _generation(columns: Sequence[Column], answer: Column | None, *, label: Column | None) -> Guess | None:
    """Return a task of writing text, if the names of the fields ask for one.

    Args:
        columns: the fields.
        answer: the field that the user has named; None to look for one.
        label: a field that may be a label instead. Then both the prompt and the answer must be known by name.
    """
    written = answer or _completion(columns)
    if written is None or not (
        written.is_free_text or written.text_lists or (written.texts and label is None)
    ):
        return None
    texts, others = _texts(columns, [written.name])
    prompts = [column for column in texts if set(column.words) & _PROMPT_WORDS]
    if not texts or (label is not None and not prompts):
        return None
    texts = prompts or texts
    only = texts[0].name if len(texts) == 1 and "prompt" in texts[0].words else None
    notes = {"prompt": "the model reads this and writes on"} if only is None else {}
    if any("\n" in text for text in written.texts):
        notes["completion"] = (
            "a score reads an answer up to its first newline, and some have more than one line"
        )
    reasons = [f"{written.name} holds the text to write, as its name and its values say."]
    if label is not None:
        reasons.append(f"{label.name} may be a label: --label {label.name} makes this a classification.")
    return Guess(
        summary=f"generation of {written.name} from {' and '.join(column.name for column in texts)}",
        data={
            "prompt": f"{{{only}}}" if only else _prompt(texts, written.words[0].capitalize()),
            "completion": f"{{{written.name}}}",
        },
        notes=notes,
        reasons=(*reasons, *_about_texts(texts, others)),
        used=(written.name, *(column.name for column in texts)),
    )


def _completion(columns: Sequence[Column]) -> Column | None:
    for word in _COMPLETION_WORDS.split():
        for column in columns:
            is_text = column.is_free_text or column.text_lists or len(column.counts) > MAX_LABELS
            if word in column.words and is_text and not column.is_number and column.is_complete:
                return column
    return None
