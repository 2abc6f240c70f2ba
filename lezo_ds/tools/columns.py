"""The columns of a table: its records, and the task that a recipe for them describes.

    conversations                           chat
    conversations or texts, and answers     generation
    texts, choices, and which is right      multiple choice
    texts, and few different values         classification

What is not clear is asked for, by the option of `lezo-ds init` that names a column.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lezo_ds.data.tables import TABLES, kind_of, read_source
from lezo_ds.errors import UserError, cut, did_you_mean
from lezo_ds.tasks.base import Record
from lezo_ds.tasks.conversations import ASSISTANT, are_objects, are_turns, read_messages
from lezo_ds.tasks.custom import read_choice
from lezo_ds.tasks.labels import label_text, labels_that_read
from lezo_ds.tasks.template import parse_template, readable

logger = logging.getLogger(__name__)

_FEWEST_RECORDS = 10
_MAX_LABELS = 200  # a column with more different values is not taken for labels, unless it is named
_MAX_LABEL_LENGTH = 60  # characters
# A label is probably a misspelling of one that is this many times as frequent and this similar.
_RARE = 10
_NEAR = 0.85
_MOST = 0.8  # of the records must fit a reading of a column
_EMPTY = {"na", "n/a", "#n/a", "<na>", "none", "null", "\\n", "-", "?", "-1"}
"""What programs write into a cell without a value. NaN is no label anyway."""
_QUESTIONS = {"completion": "prompt", "response": "prompt", "output": "instruction"}
"""The usual names of columns with questions, by those of the columns with their answers."""
_CHOICES = "(option|choice|ending|candidate|alternative)s?"
_LETTERED = re.compile(
    rf"(?P<stem>(({_CHOICES}|answer|ans|solution|sol|opt|op)[ _.-]?)?)\(?(?P<mark>[A-Z0-9])\)?",
    re.IGNORECASE,
)
"""A column with one of several choices: A, b, option_c, Answer1 or opa."""


def read_records(source: str, encoding: str) -> list[Record]:
    """Return the records. A few rows that are none are left to the dry run, which names their line.

    Raises:
        UserError: There is no file of records, most rows are no records, or the first row of a
            table is probably a record, since a later one has its value.
    """
    rows = read_source("DATA", source, encoding)
    records = [record for _, record in rows if isinstance(record, Mapping)]
    problems = [(place, row) for place, row in rows if not isinstance(row, Mapping)]
    is_table = kind_of(Path(source)) in TABLES
    if len(problems) > len(records):
        place, problem = problems[0]
        raise UserError(
            f"{len(problems)} of {len(rows)} rows of {source} are no records; the first{place} "
            f"{problem}",
            fix="write a value for each column, or one JSON object with different keys, in each "
            "row",
        )
    for column in records[0] if is_table and records else ():
        if any(record[column] == column for record in records):
            raise UserError(
                f"the first row of {source} is taken for the names of its columns, but {column} "
                "is also a value in its column",
                fix="add a first row with names such as text,label, remove a later row that "
                "repeats the names, or rename this column",
            )
    return records


def describe_task(
    records: Sequence[Record],
    *,
    text: str | None = None,
    label: str | None = None,
    answer: str | None = None,
    reward: str | None = None,
    in_chat: bool = False,
    label_map: Mapping[str, str] | None = None,
) -> tuple[str, dict[str, Any]]:
    """Describe the task of a table's records.

    A table with a column of conversations is a chat. Otherwise the model reads the column `text`,
    by default the only one that holds texts, and gives what `label`, `answer` or `reward` asks for.
    Columns with the usual names of questions and answers need not be named, nor those with choices.

    Args:
        records: The rows of the table.
        text: Column that the model reads.
        label: Column with the right label, by default the only one with few different values, or
            the only one that says which choice is right.
        answer: Column with a text that the model shall write.
        reward: package.module:function that judges what the model writes.
        in_chat: Whether the model has a chat template, which then writes the prompt.
        label_map: What labels of the table count as. They may also differ in case.

    Returns:
        A title, and the keys of a recipe's section `data` that describe the task.

    Raises:
        UserError: The task is not clear, or the records are too few for it.
    """
    named = {"--text": text, "--label": label, "--answer": answer}
    columns = _columns(records, named, needs_target=reward is None)
    conversations = [name for name, values in columns.items() if any(map(are_turns, values))]
    if text is None and label is None and answer is None:
        text, answer = _usual_columns(columns, reward)
        if reward is None and len(conversations) == 1 and text not in conversations:
            (messages,) = conversations
            _refuse_no_answers(messages, records)
            return f"Chat: the messages in {messages}", {"messages": messages}
    choices = None
    if answer is None and reward is None and not label_map:
        choices = _find_choices(columns, records, label)
        label = choices.label if choices else label
    if answer is None and label is None and reward is None:
        label = _only("label", "few different values", _few_valued(columns, without=text))
    target = str(answer or label)
    if text is None:
        taken = {target, *(choices.columns if choices else ())}
        others = {name: columns[name] for name in columns if name not in taken}
        texts = [name for name in others if _are_texts(others[name])]
        text = _only("text", "texts", texts or [name for name in others if name in conversations])
    if not in_chat:
        _refuse_turns([name for name in (text, answer) if name in conversations])
    template: dict[str, Any] = {"chat_template": True} if in_chat else {}
    prompt = _field(text)
    if text == "instruction" and any(columns.get("input", ())):
        prompt += "\n\n{input}"
    if reward is not None:
        return f"Answers to {text}, judged by {reward}", {"prompt": prompt, **template}
    if choices:
        task = {"prompt": f"{prompt}\nAnswer:", **choices.keys(), **template}
        return f"Multiple choice: {text}, answered by {label}", task
    if text not in conversations and (text != "prompt" or answer is None):
        question = target.replace("_", " ").replace("{", "{{").replace("}", "}}")
        prompt += f"\n{question.capitalize()}:"  # such as "{body}\nTopic:"
    if answer is not None:
        completion = _field(_with_text(answer, columns[answer]))
        task = {"prompt": prompt, "completion": completion, **template}
        return f"Generation of {answer} from {text}", task
    stored = getattr(records[0], "class_names", {}).get(target, ())
    labels = _labels(target, columns[target], label_map or {}, stored)
    task = {"prompt": prompt, "label_field": label, "labels": labels, **template}
    return f"Classification of {text} by {label}", task


def answers_have_lines(records: Sequence[Record], task: Mapping[str, Any]) -> bool:
    """Return whether an answer that a task learns has several lines.

    Args:
        records: The rows of the table.
        task: Their task, by `describe_task`.
    """
    if "completion" not in task:
        return False
    answers = readable(parse_template("data.completion", task["completion"]).texts, records)
    return any("\n" in text.strip() for texts in answers for text in texts)


def _columns(
    records: Sequence[Record], named: Mapping[str, str | None], *, needs_target: bool
) -> dict[str, list[object]]:
    """Return the values of each column, None where a record lacks it.

    Args:
        records: The rows of the table.
        named: By option, the column that it names.
        needs_target: Whether a column of texts alone is too little.

    Raises:
        UserError: The columns are not those of a table with a task, or the records are too few.
            What the columns show comes first: misread, a file has few records as well.
    """
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    for option, name in named.items():
        if name is not None and name not in columns:
            fix = f"use one of {', '.join(columns)}"
            raise UserError(f"{option} {name} is not a column", fix=fix)
    has_turns = any(are_turns(value) for values in columns.values() for value in values)
    if len(columns) == 1 and needs_target and not has_turns:
        raise UserError(
            f"there is one column only, {cut(next(iter(columns)), 80)!r}",
            fix="add one with labels or answers, or give --reward; if it holds several, separate "
            "them by commas, or by tabs in a .tsv file",
        )
    if len(records) < _FEWEST_RECORDS:
        fix = f"add records: {_FEWEST_RECORDS} at least, and better 30 of each kind"
        raise UserError(f"{len(records)} records are too few to train on and to score", fix=fix)
    return columns


def _refuse_no_answers(name: str, records: Sequence[Record]) -> None:
    """Refuse a column of conversations of which none has a turn of the assistant."""
    conversations = list(readable(partial(read_messages, field=name), records))
    if any(turn.role == ASSISTANT for turns in conversations for turn in turns):
        return
    if not conversations:
        read_messages(records[0], name)  # which says what is wrong
    raise UserError(
        f"no conversation in {name} has a turn of the assistant to learn",
        fix="add turns of the assistant, give --answer COLUMN with the answers, or give --reward "
        "MODULE:FUNCTION that judges answers of the model",
    )


def _refuse_turns(names: Sequence[str]) -> None:
    """Refuse columns of conversations, since the model has no chat template."""
    if names:
        raise UserError(
            f"the column {names[0]} holds turns of conversations, and the model has no chat "
            "template to write them",
            fix="use a model that was trained for conversations, or write texts in their place",
        )


def _field(column: str) -> str:
    """Return the template of a column's value. UserError: no template can name the column."""
    if not _can_name(column):
        raise UserError(
            f"no template can name the column {column!r}",
            fix="rename it in the data, without braces, colons and spaces at its ends",
        )
    return f"{{{column}}}"


def _with_text(column: str, values: Sequence[object]) -> str:
    """Return a column, or what holds texts in its objects: answers.text in SQuAD's layout."""
    first: Mapping[str, Any] = next(
        (each for each in values if isinstance(each, Mapping) and any(each.values())), {}
    )
    for key, value in first.items():
        if isinstance((*value, None)[0] if isinstance(value, list) else value, str):
            return f"{column}.{key}"
    return column


def _can_name(column: str) -> bool:
    """Return whether a template can name a column."""
    try:
        return parse_template("data.prompt", f"{{{column}}}").fields == (column,)
    except UserError:
        return False


def _usual_columns(
    columns: Mapping[str, Sequence[object]], reward: str | None
) -> tuple[str | None, str | None]:
    """Return the columns of questions and answers if they have the usual names, or None twice.

    Raises:
        UserError: The columns hold pairs of preference, or answers of which some are bad.
    """
    if reward is None and "rejected" in columns:
        raise UserError(
            "the column rejected holds one of two answers, and no objective learns from pairs",
            fix="give --text COLUMN --answer chosen, or without --answer remove this column",
        )
    judged = {"completion", "messages", "conversations"} & columns.keys()
    for name in ("label", "kto_tag"):
        if reward is None and judged and set(map(type, columns.get(name, [1]))) <= {bool}:
            raise UserError(
                f"the column {name} says which answers are good, and no objective learns from bad "
                "ones",
                fix=f"keep the records of good answers, and remove the column {name}; or, to "
                f"predict it, give --text COLUMN --label {name}",
            )
    for answer, question in _QUESTIONS.items():
        if answer in columns and question in columns:
            return question, answer
    return None, None


class _Choices(NamedTuple):
    """The columns of a table that hold choices, and the one that says which is right.

    Attributes:
        columns: Those with the choices.
        templates: Of data.choices.
        are_usual: Whether their names say that they hold choices.
        label: The column that says which choice is right.
        labels: Of data.labels; None if that column has texts of choices, or numbers from 0.
    """

    columns: tuple[str, ...]
    templates: list[str]
    are_usual: bool
    label: str = ""
    labels: list[int] | list[str] | None = None

    def keys(self) -> dict[str, Any]:
        """Return the keys of the section `data` that say so."""
        keys = {"label_field": self.label, "choices": self.templates, "labels": self.labels}
        return {key: value for key, value in keys.items() if value is not None}


def _find_choices(
    columns: Mapping[str, Sequence[object]], records: Sequence[Record], label: str | None
) -> _Choices | None:
    """Return the columns with choices and with the right ones, or None if there are none.

    Args:
        columns: The values of each column.
        records: The rows of the table.
        label: The column that says which choice is right, if it is given.

    Raises:
        UserError: Several columns may say which choice is right, or choices are no lists of texts.
    """
    found: dict[str, _Choices] = {}
    unused: list[str] = []
    for choices in _with_choices(columns):
        others = [name for name in columns if name not in choices.columns]
        right = [_with_right(choices, name, records) for name in ([label] if label else others)]
        found |= {each.label: each for each in right if each}
        if choices.are_usual and not any(right):
            unused += choices.columns
    if found:
        return found[_only("label", "the right choice", list(found))]
    if unused:
        logger.warning(
            "%s may hold choices, and %s by their numbers, letters or texts which is right: they "
            "are not used",
            ", ".join(unused),
            f"column {label} does not say" if label else "no column says",
        )
    return None


def _with_choices(columns: Mapping[str, Sequence[object]]) -> Iterator[_Choices]:
    """Yield the columns that may hold choices: lists, objects with a list or with letters, letters.

    Raises:
        UserError: Choices are no lists of texts.
    """
    lettered: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name, values in columns.items():
        if not _can_name(name):
            continue
        value = next((value for value in values if value), None)
        is_usual = re.fullmatch(_CHOICES, name, re.IGNORECASE) is not None
        is_text = isinstance(value, str) and value[0] + value[-1] == "[]"
        if is_usual and (is_text or (are_objects(value) and not are_turns(value))):
            raise UserError(
                f"the column {name} has {'lists as texts' if is_text else 'lists of objects'}",
                fix="write lists of texts in a .jsonl or .parquet file, or each choice in a column "
                "of its own: A, B, ...",
            )
        if isinstance(value, list) and not are_objects(value):
            yield _Choices((name,), [_field(name)], is_usual)
        elif isinstance(value, Mapping):
            lists = {key: str(each) for key, each in value.items() if isinstance(each, list)}
            keys = [max(lists, key=lambda key: len(lists[key]))] if lists else _letters(value)
            inner = [f"{name}.{key}" for key in keys]
            if inner and all(map(_can_name, inner)):
                yield _Choices((name,), list(map(_field, inner)), is_usual)
        elif isinstance(value, str | int | float):
            mark = _LETTERED.fullmatch(name)
            if mark:
                lettered[mark["stem"]][mark["mark"]] = name
    for stem, names in lettered.items():
        found = tuple(names[letter] for letter in _letters(names))
        if len(found) > 2 or (found and (stem or found[0].isupper())):
            yield _Choices(found, list(map(_field, found)), are_usual=True)


def _letters(names: Collection[str]) -> list[str]:
    """Return those of some names that are letters or digits from A, a, 0 or 1 on, if two are."""
    for first in "Aa01":
        letters = list(takewhile(names.__contains__, map(chr, count(ord(first)))))
        if len(letters) > 1:
            return letters
    return []


def _with_right(choices: _Choices, name: str, records: Sequence[Record]) -> _Choices | None:
    """Return columns with choices, with a column if it says which is right in most records.

    If nothing else tells choices from other lists, each place in them is right at times.
    """
    templates = [parse_template("data.choices", each) for each in choices.templates]
    read = readable(partial(read_choice, templates, name), records)
    given = [choice for choice in read if choice.label is not None and len(choice.texts) > 1]
    labels, number = labels_that_read(given)
    if not given or number < _MOST * len(given):
        return None
    size = median(len(choice.texts) for choice in given)
    if not choices.are_usual and len({choice.label for choice in given}) < size:
        return None
    return choices._replace(label=name, labels=labels)


def _labels(
    name: str, values: Sequence[object], label_map: Mapping[str, str], stored: Sequence[str]
) -> list[str] | dict[str, str]:
    """Return the labels in a column, sorted, or a map if some count as others.

    Labels that differ in case only are one: the most frequent of them. Cells without one are left
    out. `stored` are the names of the labels 0, 1, ..., if the data set has them.
    """
    names = {str(place): label for place, label in enumerate(stored)}
    labels = (label_text(name, value) for value in values)
    counts = Counter(label for label in labels if label is not None)
    for label in label_map:
        if label not in counts:
            fix = did_you_mean(label, counts, "write --label-map LABEL=LABEL")
            raise UserError(f"--label-map: the column {name} has no label {label}", fix=fix)
    texts: dict[str, str] = {}
    spellings: dict[str, str] = {}
    classes: Counter[str] = Counter()
    for label, number in counts.most_common():
        text = label_map.get(label, names.get(label, label))
        texts[label] = spellings.setdefault(text.casefold(), text)
        classes[texts[label]] += number
        if texts[label] != names.get(label, label):
            logger.warning("%d records with the label %s count as %s", number, label, texts[label])
    if not counts:
        problem = f"all {len(values)} records lack a label: the column {name} is empty"
        raise UserError(problem, fix="fill it in, or give --label with another column")
    if len(classes) > len(values) / 2:
        problem = f"the column {name} has {len(classes)} different labels in {len(values)} records"
        fix = f"add records of each class or, if the model shall write them, give --answer {name}"
        raise UserError(problem, fix=fix)
    if len(classes) < 2:
        problem = f"the column {name} has no two labels, only {list(classes)}"
        raise UserError(problem, fix="add records of another label, or name another column")
    for label, number in classes.items():
        if label.lower() in _EMPTY:
            logger.warning(
                "%d records have the label %s, which counts as a label; if it means that there is "
                "none, empty these cells",
                number,
                label,
            )
        frequent = [other for other in classes if classes[other] >= _RARE * number]
        for near in get_close_matches(label, frequent, n=1, cutoff=_NEAR):
            logger.warning(
                "the label %s (%d records) is almost %s (%d records); to count it as that, add "
                "--label-map '%s=%s'",
                label,
                number,
                near,
                classes[near],
                label,
                near,
            )
    if all(label == text for label, text in texts.items()):
        return sorted(texts)
    return dict(sorted(texts.items()))


def _few_valued(columns: Mapping[str, Sequence[object]], without: str | None) -> list[str]:
    """Return the columns of short values that repeat, except for one column."""
    found = []
    for name, values in columns.items():
        try:
            labels = {label_text(name, value) or "" for value in values} - {""}
        except UserError:  # a value is no label
            continue
        is_few = 1 < len(labels) <= min(_MAX_LABELS, len(values) / 2)
        if name != without and is_few and max(map(len, labels)) <= _MAX_LABEL_LENGTH:
            found.append(name)
    return found


def _are_texts(values: Sequence[object]) -> bool:
    """Return whether most values are different strings, most of them of several words."""
    strings = {value for value in values if isinstance(value, str)}
    num_sentences = sum(" " in string.strip() for string in strings)
    return len(strings) > len(values) / 2 and num_sentences > len(strings) / 2


def _only(option: str, meaning: str, names: Sequence[str]) -> str:
    """Return the only column that may be meant, or ask for the option that names it."""
    if len(names) == 1:
        return names[0]
    problem = f"no column holds {meaning}"
    if names:
        problem = f"several columns hold {meaning}: {', '.join(names)}"
    fix = f"give --{option} COLUMN"
    if option == "label":
        fix += ", or --answer COLUMN for texts to write"
    raise UserError(problem, fix=fix)
