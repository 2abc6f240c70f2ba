"""Tasks that a recipe describes: templates over the fields of a user's own records.

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
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lezo_ds.errors import UserError, cut
from lezo_ds.tasks.base import Example, Message, Record, Task, Turns, with_fields
from lezo_ds.tasks.conversations import (
    ASSISTANT,
    USER,
    are_objects,
    check_tools,
    read_messages,
    read_system,
    with_system,
)
from lezo_ds.tasks.kinds import Chat, Classification, Generation, MultipleChoice
from lezo_ds.tasks.labels import (
    Choice,
    Labels,
    find_choice,
    label_key,
    label_text,
    labels_are_numbers,
    warn_of_merged,
)
from lezo_ds.tasks.metrics import REWARD
from lezo_ds.tasks.template import (
    Template,
    after,
    field_value,
    parse_template,
    readable,
    shown,
)

logger = logging.getLogger(__name__)

CUSTOM = "custom"
"""The name of a task that a recipe describes."""
_POINTED = re.compile(r"-?[0-9]+\.0+")
_NAMES = "label"
"""The field with the names of the choices, next to the field with their texts (ARC)."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The keys of the section `data` that describe a task (see lezo_ds/config/schema.py).

    None is a key that is not set. `lezo_ds/config/components.py` copies them from the
    configuration.
    """

    prompt: str | None = None
    label_field: str | None = None
    labels: Sequence[str] | Mapping[str, str] | None = None
    choices: Sequence[str] | None = None
    completion: str | None = None
    messages: str | None = None
    chat_template: bool = False
    system_prompt: str | None = None


def make_task(described: Description) -> Task:
    """Return the task that a recipe describes.

    Raises:
        UserError: keys are missing or exclude each other, or a template is wrong.
    """
    if described.messages is not None:
        _refuse_others(
            "messages", described, "prompt", "label_field", "labels", "choices", "completion"
        )
        return _Conversations(
            name=CUSTOM,
            fields={described.messages: object},
            system_prompt=described.system_prompt,
        )
    if described.system_prompt is not None and not described.chat_template:
        raise UserError(
            "data.system_prompt needs data.chat_template=true or data.messages",
            fix="add data.chat_template=true, or write the text into data.prompt",
        )
    assert described.prompt is not None
    prompt = _with_fields("data.prompt", described.prompt)
    completion = None
    if described.completion is not None:
        _refuse_others("completion", described, "label_field", "labels", "choices")
        completion = _with_fields("data.completion", described.completion)
    if described.labels is None and described.choices is None:
        return _WrittenAnswers(
            **_fields(prompt.fields, completion.fields if completion else ()),
            has_answers=completion is not None,
            metric=Generation.metric if completion else REWARD,
            prompt=prompt,
            completion=completion,
            in_chat=described.chat_template,
            system_prompt=described.system_prompt,
        )
    if described.label_field is None:
        raise UserError(
            "data.label_field is missing",
            fix="set it to the field of the records that holds the label",
        )
    if described.choices is not None:
        return _choices(prompt, described.label_field, described.choices, described.labels)
    assert described.labels is not None
    return _labels(prompt, described.label_field, described.labels)


def _with_fields(key: str, text: str) -> Template:
    """Return the template in the value of a recipe key, which names a field of the records."""
    template = parse_template(key, text)
    if not template.fields:
        raise UserError(
            f"{key}={text!r} names no field of the records",
            fix="put the name of a field in single braces, such as {text}",
        )
    return template


def _refuse_others(name: str, described: Description, *others: str) -> None:
    both = ", ".join(f"data.{key}" for key in others if getattr(described, key) is not None)
    if both:
        raise UserError(f"data.{name} and {both} cannot be set together", fix=f"remove {both}")


def _fields(
    asked: Sequence[str], answers: Sequence[str], choices: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the attributes of a task with the fields of its prompt, its answers and its choices.

    One of the choices may be the answer's own field, as in SciQ.

    Raises:
        UserError: a prompt shows the answer.
    """
    shown_answers = ", ".join(name for name in answers if name in asked)
    if shown_answers:
        raise UserError(
            f"data.prompt shows the answer: it has {shown_answers}, too",
            fix=f"remove {{{shown_answers}}} from it",
        )
    return {
        "name": CUSTOM,
        "fields": dict.fromkeys((*asked, *choices, *answers), object),
        "answer_fields": tuple(name for name in answers if name not in choices),
    }


@dataclass(frozen=True, kw_only=True)
class _Labels(Classification):
    """Records whose `label_field` has one of the labels of a recipe.

    Attributes:
        prompt: template of the prompt.
        label_field: the field with the label.
        texts: what the model gives for each class.
        class_of: the index in `texts` of each label that a record may hold, by its index in
            `known`.
        known: these labels.
    """

    prompt: Template
    label_field: str
    texts: Sequence[str]
    class_of: Sequence[int]
    known: Labels

    def build_example(self, record: Record) -> Example:
        filled = self.prompt.fill_prompt(record)
        candidates = tuple(after(filled, text) for text in self.texts)
        number = self.known.find(self.label_field, field_value(record, self.label_field))
        label = None if number is None else self.class_of[number]
        return Example(filled, candidates, label)

    def survey(self, records: Sequence[Record]) -> Task:
        warn_of_merged(self.label_field, readable(self._label_of, records))
        return self

    def _label_of(self, record: Record) -> tuple[str | None, object]:
        value = field_value(record, self.label_field)
        return label_text(self.label_field, value), value


def _labels(prompt: Template, label_field: str, labels: Sequence[str] | Mapping[str, str]) -> Task:
    """Return the classification of records whose `label_field` has one of the labels.

    A list has the labels, which are also the texts that the model gives. A map has texts by label;
    labels of the same text are one class.
    """
    if not isinstance(labels, Mapping):
        labels = {label: label for label in labels}
        classes = labels
    else:
        classes = _classes(labels)
    texts = list(classes)
    spellings = Counter(label_key(text).casefold() for text in texts)
    repeated = [text for text, number in spellings.items() if number > 1 or not text.strip()]
    if len(texts) < 2 or repeated:
        raise UserError(
            f"data.labels={cut(str(labels), 200)} does not hold two or more labels, each with a "
            f"text of its own, whatever its case (not of its own: {repeated})",
            fix="add records of another class, or write a map in which labels that differ in case "
            "only have the same text",
        )
    return _Labels(
        **_fields(prompt.fields, [label_field]),
        labels=list(classes.values()),
        prompt=prompt,
        label_field=label_field,
        texts=texts,
        class_of=[texts.index(text) for text in labels.values()],
        known=Labels(tuple(labels)),
    )


def _classes(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the label of each class by its text: the text itself, or the first of its labels."""
    classes: dict[str, str] = {}
    # A journal does not keep the order of a map, so the order of classes must not depend on it.
    for label, text in sorted(labels.items()):
        if text not in classes or label == text:
            classes[text] = label
    return classes


@dataclass(frozen=True, kw_only=True)
class _Choices(MultipleChoice):
    """Records that hold the texts to choose from.

    Attributes:
        prompt: template of the prompt.
        label_field: the field that says which is right.
        texts: templates of the texts, or of one field with a list of them.
        known: what `label_field` holds for the first, second, ... choice; None if it has the number
            of a choice, or its text.
        are_numbers: which of these two. `survey` finds it out.
    """

    prompt: Template
    label_field: str
    texts: Sequence[Template]
    known: Labels | None
    are_numbers: bool = False

    def build_example(self, record: Record) -> Example:
        filled = self.prompt.fill_prompt(record)
        choice = self._choice_of(record)
        if len(choice.texts) < 2 or not all(choice.texts):
            fix = "correct the record, or data.choices"
            if any(text.startswith("[") for text in choice.texts):
                fix = "store lists as lists of JSON or parquet, not as text"
            raise UserError(
                f"data.choices gives {shown(choice.texts)}, not two or more texts", fix=fix
            )
        if self.labels and not choice.names and len(choice.texts) > len(self.labels):
            raise UserError(
                f"data.choices gives {len(choice.texts)} texts, and data.labels has "
                f"{len(self.labels)} labels",
                fix="list in data.labels what the field holds for each choice",
            )
        candidates = tuple(after(filled, text) for text in choice.texts)
        if self.known is None or choice.label in choice.names:
            label = find_choice(self.label_field, choice, are_numbers=self.are_numbers)
        else:
            label = self.known.find(self.label_field, field_value(record, self.label_field))
        return Example(filled, candidates, label)

    def names(self, example: Example) -> Sequence[Any]:
        own = _own_names(self.texts, example.record, len(example.candidates))
        return own or super().names(example)

    def survey(self, records: Sequence[Record]) -> Task:
        if self.known is not None:
            return self
        # A record with one text, such as a list that is stored as text, is refused by itself.
        choices = [each for each in readable(self._choice_of, records) if len(each.texts) > 1]
        are_numbers = bool(choices) and labels_are_numbers(self.label_field, choices)
        return replace(self, are_numbers=are_numbers)

    def _choice_of(self, record: Record) -> Choice:
        return read_choice(self.texts, self.label_field, record)


def _choices(
    prompt: Template,
    label_field: str,
    choices: Sequence[str],
    labels: Sequence[str] | Mapping[str, str] | None,
) -> Task:
    """Return the task of records with choices; see `_Choices`."""
    if isinstance(labels, Mapping):
        raise UserError(
            "data.labels of a task with data.choices is a map, not a list",
            fix="list the values of data.label_field in the order of the choices, "
            "such as [A, B, C, D]",
        )
    texts = [parse_template("data.choices", choice) for choice in choices]
    fields_of_texts = [field for template in texts for field in template.fields]
    return _Choices(
        **_fields(prompt.fields, [label_field], fields_of_texts),
        labels=labels or (),
        prompt=prompt,
        label_field=label_field,
        texts=texts,
        known=None if labels is None else Labels(labels),
    )


def read_choice(templates: Sequence[Template], label_field: str, record: Record) -> Choice:
    """Return the texts that templates of data.choices give of a record, and its label.

    A record may have fewer than others: the last ones are empty.
    """
    fields = [field for template in templates for field in template.fields]
    empty = {field: "" for field in fields if field_value(record, field) is None}
    filled = with_fields(record, empty)
    texts = [text for template in templates for text in template.texts(filled)]
    while texts and not texts[-1].strip():
        texts.pop()
    value = field_value(record, label_field)
    label = label_text(label_field, value)
    return Choice(texts, label, type(value) is int, _own_names(templates, record, len(texts)))


def _own_names(templates: Sequence[Template], record: Record, size: int) -> Sequence[str]:
    """Return a record's own names for its choices: {"text": [red, blue], "label": [A, B]}.

    The result is empty unless there are as many distinct names as choices, `size`.
    """
    section, _, _ = "".join(templates[0].fields).rpartition(".")
    with suppress(KeyError, TypeError, UserError):
        field = f"{section}.{_NAMES}"
        names = [label_text(field, name) or "" for name in field_value(record, field)]
        if len(set(names)) == size:
            return names
    return ()


@dataclass(frozen=True, kw_only=True)
class _WrittenAnswers(Generation):
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
        asked = self._turns(self.prompt, record)
        answered = self._turns(self.completion, record)
        prompt = asked[-1].content if asked else self.prompt.fill_prompt(record)
        texts = [] if answered or self.completion is None else self.completion.texts(record)
        texts = [text for text in texts if text.strip()]
        answers = tuple(map(str.strip, texts))
        if asked or answered:
            check_tools(record)
        if asked or answered or self.in_chat:
            asked = asked or (Message(USER, prompt),)
            answered = answered or tuple(Message(ASSISTANT, text) for text in answers[:1])
            if answered[: len(asked)] == asked:  # a whole conversation, as in pairs of preference
                answered = answered[len(asked) :]
            context = [turn._replace(weight=0) if turn.is_trained else turn for turn in asked]
            example = _of_turns((*context, *answered), self.system_prompt, answers)
            return replace(example, prompt=prompt)
        gold = answers[:1]  # the one to train on
        if prompt.endswith("\n"):  # the first line of code may be indented
            gold = tuple(text.rstrip().lstrip("\r\n") for text in texts[:1])
        gold = tuple(f"{after(prompt, text)}\n" for text in gold)
        return Example(prompt, gold, 0 if gold else None, references=answers)

    def survey(self, records: Sequence[Record]) -> Task:
        if self.completion is not None:
            found = readable(self.completion.texts, records)
            answers = [text for texts in found for text in texts if text]
            if answers and all(map(_POINTED.fullmatch, answers)):
                logger.warning(
                    "all %d answers are whole numbers with a point, such as %s, and so the model "
                    "writes it: a column with an empty cell may have got it",
                    len(answers),
                    answers[0],
                )
        return self

    def _turns(self, template: Template | None, record: Record) -> Turns:
        """Return the turns in the only field of a template, or nothing if it gives text."""
        if template is None or not are_objects(template.only_value(record)):
            return ()
        return read_messages(record, template.fields[0])


@dataclass(frozen=True, kw_only=True)
class _Conversations(Chat):
    """Conversations, each a list of turns in a field.

    Attributes:
        system_prompt: of conversations that have none.
    """

    system_prompt: str | None

    def build_example(self, record: Record) -> Example:
        messages = read_messages(record, self.field)
        check_tools(record)
        return _of_turns(messages, read_system(record) or self.system_prompt)


def _of_turns(turns: Turns, system_prompt: str | None, references: tuple[str, ...] = ()) -> Example:
    """Return the example of a conversation, up to its last turn to learn: what follows has no use.

    `references` are all right answers; () if this turn is the only one.
    """
    trained = [row for row, turn in enumerate(turns) if turn.is_trained]
    if not trained:
        return Example(turns[-1].content, (), None, messages=with_system(turns, system_prompt))
    last = trained[-1]
    asked = turns[last - 1].content if last else ""
    gold = (turns[last].content,)
    messages = with_system(turns[: last + 1], system_prompt)
    return Example(asked, gold, 0, references=references or gold, messages=messages)
