"""Tasks that a recipe describes: templates over the fields of a user's records.

The keys of the section `data` that are set decide the kind of the task:

    prompt, label_field, labels                classification: one text a label, the same for all
    prompt, label_field, choices[, labels]     multiple_choice: the record has the texts
    prompt, completion                         generation: the record has the right answers
    prompt                                     generation, judged by a reward
    messages                                   chat: the record has a conversation

For example, prompt "{body} It is about", label_field topic and labels [bug, billing] make

    {"id": 7, "body": "It fails.", "topic": "bug"}

an Example with the prompt "It fails. It is about", the candidates " bug" and " billing", and the
label 0. With chat_template, the prompt is instead the turn of a user in the tokenizer's template.

A record's label is `str` of what a library has read. NaN, null and an empty text are no label.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lezo_ds.config import DataConfig
from lezo_ds.config.schema import CUSTOM
from lezo_ds.data.encode import without_marks
from lezo_ds.data.examples import ASSISTANT, Example, Turn
from lezo_ds.data.metrics import REWARD
from lezo_ds.data.mezo import TASKS
from lezo_ds.data.tasks import Chat, Classification, Generation, MultipleChoice, Task
from lezo_ds.data.template import (
    Record,
    Template,
    after,
    field_template,
    field_text,
    field_value,
    parse_template,
    shown,
)
from lezo_ds.data.turns import read_turns
from lezo_ds.errors import UserError, cut, did_you_mean
from lezo_ds.user_code import call_of_user

_STORED_TURNS = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")
"""Matches a list of turns that a table has as text, as JSON or as Python writes it."""


def find_task(data: DataConfig) -> Task:
    """Return the task that a recipe names or describes, with the metric that it asks for.

    Raises:
        UserError: no task has its name, or the description is incomplete.
    """
    task = _described(data) if data.task == CUSTOM else TASKS.find(data.task)
    if isinstance(task, type):
        task = call_of_user(f"data.task={data.task}", task)
    if data.metric is not None:
        task = replace(task, metric=data.metric)
    return task


def _described(data: DataConfig) -> Task:
    """Return the task that the keys of `data` describe. The config has checked their combination.

    Raises:
        UserError: keys are of several kinds of tasks, or lack one; a template is wrong; or the
            prompt shows the answer.
    """
    kinds = [data.messages, data.completion, data.label_field]
    if kinds.count(None) < 2 or (data.messages and data.prompt):
        raise UserError(
            "data.messages, data.completion and data.label_field are of three kinds of tasks",
            fix="keep the keys of one of them",
        )
    if data.label_field is not None and not (data.labels or data.choices):
        raise UserError(
            "data.label_field needs data.labels or data.choices",
            fix="add one of them, or remove it: a reward gets all columns",
        )
    if data.system_prompt is not None and not data.in_chat:
        raise UserError(
            "data.system_prompt needs a chat template", fix="add data.chat_template=true"
        )
    if data.messages is not None:
        return _Conversations(
            name=CUSTOM,
            field=data.messages,
            system_prompt=data.system_prompt,
        )
    assert data.prompt is not None
    prompt = field_template("data.prompt", data.prompt)
    completion = None
    answers: tuple[str, ...] = ()
    if data.completion is not None:
        completion = field_template("data.completion", data.completion)
        answers = completion.fields
    elif data.label_field is not None:
        answers = (data.label_field,)
    for name in answers:
        if name in prompt.fields:
            raise UserError(
                f"data.prompt shows the answer: it has {name}, too",
                fix=f"remove {{{name}}} from it",
            )
    common: dict[str, Any] = {
        "name": CUSTOM,
        "prompt": prompt,
        "answer_fields": answers,
    }
    if data.label_field is None:
        return _Answers(
            **common,
            has_answers=completion is not None,
            metric=Generation.metric if completion else REWARD,
            completion=completion,
            in_chat=data.chat_template,
            system_prompt=data.system_prompt,
        )
    common["label_field"] = data.label_field
    if data.choices is not None:
        return _Choices(
            **common,
            labels=tuple(data.labels or ()),
            texts=tuple(parse_template("data.choices", choice) for choice in data.choices),
        )
    assert data.labels is not None
    labels = data.labels
    if not isinstance(labels, Mapping):
        labels = {label: label for label in labels}
    classes = _classes(labels)
    numbers = {text: number for number, text in enumerate(classes)}
    return _Labels(
        **common,
        keeps_shares=True,
        labels=tuple(classes.values()),
        texts=tuple(classes),
        class_of={label: numbers[text] for label, text in labels.items()},
    )


def _classes(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the label of each class by its text: the text itself, or the first of its labels.

    Raises:
        UserError: there are no two classes, or one has no text, or texts differ only in white space
            or in the width of characters.
    """
    classes: dict[str, str] = {}
    # A journal does not keep the order of a map, so the order of classes must not depend on it.
    in_order = texts.items()
    if any(label != text for label, text in in_order):
        in_order = sorted(in_order)  # type: ignore[assignment]
    for label, text in in_order:
        if text not in classes or label == text:
            classes[text] = label
    if len(classes) < 2 or not all(text.strip() for text in classes):
        raise UserError(
            f"data.labels={cut(str(dict(texts)), 200)} has fewer than two labels with texts "
            "that differ",
            fix="add records of another class, or give each label a text",
        )
    visible = {
        unicodedata.normalize("NFKC", text.replace("\ufe0f", "")).strip() for text in classes
    }
    if len(visible) < len(classes):
        raise UserError(
            f"data.labels={cut(str(list(classes)), 200)} has texts that look alike: white space or "
            "the width of characters differs",
            fix="correct the records, or give such labels the same text in a map",
        )
    return classes


def _label_text(field: str, value: object) -> str | None:
    """Return a label as `str` writes it, without marks; None if a record has none."""
    is_missing = value is None or value == "" or value != value  # only NaN differs from itself
    return None if is_missing else without_marks(field_text(field, value))


@dataclass(frozen=True, kw_only=True)
class _Labels(Classification):
    """Records whose `label_field` has one of the labels of a recipe.

    Attributes:
        prompt: template of the prompt.
        label_field: the field with the label.
        texts: what the model gives for each class.
        class_of: the index in `texts` of each label that a record may hold.
    """

    prompt: Template
    label_field: str
    texts: tuple[str, ...]
    class_of: Mapping[str, int]

    def build_example(self, record: Record) -> Example:
        label = _label_text(self.label_field, field_value(record, self.label_field))
        if label is None and self.has_answers:  # it is left out, whatever its other fields have
            return Example("", (), None)
        if label is not None and label not in self.class_of:
            known = list(self.class_of)
            raise UserError(
                f"column `{self.label_field}` is {shown(label)}, which is not one of data.labels: "
                f"{cut(', '.join(known), 200)}",
                fix=did_you_mean(label, known, "correct the record, or add it to data.labels"),
            )
        right = None if label is None else self.class_of[label]
        filled = self.prompt.fill_prompt(record)
        return Example(filled, tuple(after(filled, text) for text in self.texts), right)


@dataclass(frozen=True, kw_only=True)
class _Choices(MultipleChoice):
    """Records that hold the texts to choose from.

    The label is the index of the right text, from 0; or the text; or, as in ARC, its name in the
    field "label" of the choices. With data.labels, it is one of these, in the order of the texts.

    Attributes:
        prompt: template of the prompt.
        label_field: the field that says which is right.
        texts: templates of the texts, or of one field with a list of them.
    """

    prompt: Template
    label_field: str
    texts: tuple[Template, ...]

    def build_example(self, record: Record) -> Example:
        filled = self.prompt.fill_prompt(record)
        texts = self._texts(record)
        if len(texts) < 2 or not all(text.strip() for text in texts):
            raise UserError(
                f"data.choices gives {shown(texts)}, not two or more texts",
                fix="correct the record, or data.choices; store lists in .jsonl or .parquet",
            )
        names = self._names(record)
        if names and len(names) < len(texts):
            raise UserError(
                f"only {len(names)} of {len(texts)} choices have a label: {shown(names)}",
                fix="list one label for each choice in data.labels, or correct the record",
            )
        label = self._find(record, texts)
        return Example(filled, tuple(after(filled, text) for text in texts), label)

    def names(self, example: Example) -> Sequence[Any]:
        return self._names(example.record) or super().names(example)

    def _texts(self, record: Record) -> list[str]:
        """Return the choices of a record, which may have fewer than others."""
        if len(self.texts) == 1:
            return self.texts[0].texts(record)
        # Where others have more, a table has "", and Parquet null.
        texts = [template.fill_given(record) for template in self.texts]
        while texts and not texts[-1].strip():
            texts.pop()
        return texts

    def _names(self, record: Record) -> list[str]:
        """Return the names of choices: data.labels, or a record's own as in ARC, or none.

        A record's own names are a second list, as in {"text": [red, blue], "label": [A, B]}.
        """
        if self.labels:
            return [str(name) for name in self.labels]
        section, _, _ = "".join(self.texts[0].fields).rpartition(".")
        beside = record.get(section)
        listed = beside.get("label") if isinstance(beside, Mapping) else None
        return list(map(str, listed)) if isinstance(listed, list) else []

    def _find(self, record: Record, texts: Sequence[str]) -> int | None:
        """Return the index of the right text; None if the record has no label."""
        value = field_value(record, self.label_field)
        label = _label_text(self.label_field, value)
        if label is None:
            return None
        names = self._names(record)[: len(texts)]
        if label in names:
            return names.index(label)
        meant = set()
        if not self.labels:
            if label.isdecimal() and int(label) < len(texts):
                meant.add(int(label))
            if label in texts and not isinstance(value, int):
                meant.add(texts.index(label))
        if len(meant) != 1:
            expected = cut(", ".join(map(str, self.labels or texts)), 200)
            raise UserError(
                f"column `{self.label_field}` is {shown(label)}, which does not name one choice: "
                f"an index from 0, or one of {expected}",
                fix="list in data.labels what the column holds for the first, second, ... choice",
            )
        return meant.pop()


@dataclass(frozen=True, kw_only=True)
class _Answers(Generation):
    """Records with right answers, or with none if a reward judges what the model writes.

    Attributes:
        prompt: template of the prompt, or of one field with a conversation.
        completion: template of the answer, or of one field with several, or with turns.
        in_chat: whether the chat template writes the prompt as the turn of a user.
        system_prompt: of conversations that have none.
    """

    prompt: Template
    completion: Template | None
    in_chat: bool
    system_prompt: str | None

    def build_example(self, record: Record) -> Example:
        asked, _ = _turns_of(self.prompt, record)
        if self.completion is None:  # the model writes what comes after the others' last turn
            while asked and asked[-1]["role"] == ASSISTANT:
                asked = asked[:-1]
        prompt = asked[-1]["content"] if asked else self.prompt.fill_prompt(record)
        answered: tuple[Turn, ...] = ()
        learned: list[int] = []
        answers: list[str] = []
        if self.completion is not None and self.has_answers:
            self._refuse_bad(record)
            answered, learned = _turns_of(self.completion, record)
            if not answered:
                answers = [text for text in self.completion.texts(record) if text.strip()]
        if (asked or answered) and not self.in_chat:
            raise UserError(
                "the record has turns, which only a chat template writes",
                fix="add data.chat_template=true",
            )
        if self.in_chat:
            asked = asked or ({"role": "user", "content": prompt},)
            before = _with_system(asked, self.system_prompt)
            if answers:
                answered = ({"role": ASSISTANT, "content": answers[0].strip()},)
                learned = [0]
            gold = tuple(answered[number]["content"] for number in learned[-1:])
            return Example(
                prompt,
                gold,
                0 if gold else None,
                references=tuple(text.strip() for text in answers or gold),
                messages=(*before, *answered),
                learned=tuple(len(before) + number for number in learned),
            )
        gold = tuple(answers[:1])  # the one to train on
        if prompt.endswith("\n"):  # the first line of code may be indented
            gold = tuple(text.rstrip().lstrip("\r\n") for text in gold)
        else:
            gold = tuple(text.strip() for text in gold)
        gold = tuple(f"{after(prompt, text)}\n" for text in gold)
        references = tuple(text.strip() for text in answers)
        return Example(prompt, gold, 0 if gold else None, references=references)

    def _refuse_bad(self, record: Record) -> None:
        """Refuse an answer that is not to be learned: TRL's KTO marks it by the column `label`."""
        read = {*self.prompt.fields, *self.answer_fields}
        if "label" not in read and str(record.get("label")).lower() == "false":
            raise UserError(
                "column `label` is False, which marks a bad answer, and all answers are learned",
                fix="remove such records, or rename the column",
            )


@dataclass(frozen=True, kw_only=True)
class _Conversations(Chat):
    """Conversations, each a list of turns in a field.

    Attributes:
        field: the field with the turns.
        system_prompt: of conversations that have none.
    """

    field: str
    system_prompt: str | None

    def build_example(self, record: Record) -> Example:
        turns, learned = read_turns(self.field, field_value(record, self.field))
        if not learned:
            return Example("", (), None)
        messages = _with_system(turns, self.system_prompt)
        shift = len(messages) - len(turns)
        places = tuple(number + shift for number in learned)
        whole = Example("", (), None, messages=messages)
        return replace(whole.at_turn(places[-1]), learned=places)

    def unanswered(self) -> Task:
        return _Answers(
            name=self.name,
            has_answers=False,
            answer_fields=(),
            metric=REWARD,
            prompt=parse_template("data.messages", f"{{{self.field}}}"),
            completion=None,
            in_chat=True,
            system_prompt=self.system_prompt,
        )


def _with_system(turns: tuple[Turn, ...], system_prompt: str | None) -> tuple[Turn, ...]:
    """Return a conversation with a system prompt before it, unless it begins with its own."""
    if system_prompt is None or turns[0]["role"] in ("system", "developer"):
        return turns
    return ({"role": "system", "content": system_prompt}, *turns)


def _turns_of(template: Template, record: Record) -> tuple[tuple[Turn, ...], list[int]]:
    """Return the turns in the only field of a template, and the indices of those to learn.

    There are none if it gives text.

    Raises:
        UserError: turns are stored as text, or one cannot be read.
    """
    value = template.only_value(record)
    is_text = isinstance(value, str) and _STORED_TURNS.match(value)  # which is refused
    is_list = isinstance(value, list) and value and isinstance(value[0], Mapping)
    return read_turns(template.fields[0], value) if is_text or is_list else ((), [])
