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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from lezo_ds.errors import UserError, cut
from lezo_ds.tasks.base import BuildExample, Example, Message, Record, Survey, Task, TaskKind
from lezo_ds.tasks.conversations import (
    ASSISTANT,
    USER,
    are_objects,
    check_tools,
    read_messages,
    read_system,
    with_system,
)
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
from lezo_ds.tasks.template import Template, field_value, parse_template, shown

T = TypeVar("T")

CUSTOM = "custom"
"""The name of a task that a recipe describes."""

_METRICS: Mapping[TaskKind, str] = {
    "classification": "accuracy",
    "multiple_choice": "accuracy",
    "generation": "f1",
    "chat": "token_accuracy",
}
"""The metric of a task with right answers, unless data.metric names one."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The keys of the section `data` that describe a task (see lezo_ds/config/schema.py).

    None is a key that is not set. `lezo_ds/config/run_config.py` copies them from the
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
    metric: str | None = None

    def keys_set(self, *names: str) -> list[str]:
        """Return which of these keys are set, as a recipe names them."""
        return [f"data.{name}" for name in names if getattr(self, name) is not None]


class _Reading(NamedTuple):
    """How a task reads its records.

    Attributes:
        kind: of the task.
        prompt_fields: the fields that become the prompt, the choices or the conversation.
        answer_fields: the fields with the right answer.
        build_example: see `Task`.
        survey: see `Task`.
    """

    kind: TaskKind
    prompt_fields: tuple[str, ...]
    answer_fields: tuple[str, ...]
    build_example: BuildExample
    survey: Survey | None = None


def make_task(described: Description) -> Task:
    """Return the task that a recipe describes.

    Raises:
        UserError: keys are missing or exclude each other, or a template is wrong.
    """
    reading = _reading_of(described)
    has_answers = bool(described.keys_set("messages", "labels", "choices", "completion"))
    metric = described.metric
    if metric is None:
        metric = _METRICS[reading.kind] if has_answers else REWARD
    labels = described.labels or ()
    if isinstance(labels, Mapping):
        labels = list(_classes(labels).values())
    return Task(
        name=CUSTOM,
        hub_id=None,
        hub_config=None,
        kind=reading.kind,
        fields=dict.fromkeys((*reading.prompt_fields, *reading.answer_fields), object),
        build_example=reading.build_example,
        survey=reading.survey,
        has_answers=has_answers,
        metric=metric,
        answer_fields=tuple(
            name for name in reading.answer_fields if name not in reading.prompt_fields
        ),
        labels=labels,
    )


def _classes(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the label of each class by its text: the text itself, or the first of its labels."""
    classes: dict[str, str] = {}
    # A journal does not keep the order of a map, so the order of classes must not depend on it.
    for label, text in sorted(labels.items()):
        if text not in classes or label == text:
            classes[text] = label
    return classes


def _refuse_others(name: str, described: Description, *others: str) -> None:
    both = ", ".join(described.keys_set(*others))
    if both:
        raise UserError(f"data.{name} and {both} cannot be set together", fix=f"remove {both}")


def _reading_of(described: Description) -> _Reading:
    """Check which keys are set together, and return how the task reads its records."""
    if described.messages is not None:
        return _chat(described, described.messages)
    if described.system_prompt is not None and not described.chat_template:
        raise UserError(
            "data.system_prompt needs data.chat_template=true or data.messages",
            fix="add data.chat_template=true, or write the text into data.prompt",
        )
    assert described.prompt is not None
    prompt = parse_template("data.prompt", described.prompt)
    if not prompt.fields:
        raise UserError(
            f"data.prompt={described.prompt!r} names no field of the records",
            fix="put the name of a field in braces, such as {text}",
        )
    if described.completion is not None:
        _refuse_others("completion", described, "label_field", "labels", "choices")
        completion = parse_template("data.completion", described.completion)
        return _generation(described, prompt, completion)
    if not described.keys_set("labels", "choices"):
        return _generation(described, prompt, None)
    if described.label_field is None:
        raise UserError(
            "data.label_field is missing",
            fix="set it to the field of the records that holds the label",
        )
    if described.choices is not None:
        return _multiple_choice(prompt, described.label_field, described.choices, described.labels)
    assert described.labels is not None
    return _classification(prompt, described.label_field, described.labels)


def _classification(
    prompt: Template, label_field: str, labels: Sequence[str] | Mapping[str, str]
) -> _Reading:
    """Return how a task reads records whose `label_field` has one of the labels.

    A list has the labels, which are also the texts that the model gives. A map has texts by label;
    labels of the same text are one class.
    """
    if isinstance(labels, Mapping):
        texts = list(_classes(labels))
    else:
        labels = {label: label for label in labels}
        texts = list(labels)
    spellings = Counter(label_key(text).casefold() for text in texts)
    names = tuple(labels)
    shared = [text for text, number in spellings.items() if number > 1 or not text.strip()]
    if len(texts) < 2 or shared:
        raise UserError(
            f"data.labels={cut(str(labels), 200)} does not hold two or more labels, each with a "
            f"text of its own, whatever its case (not of its own: {shared})",
            fix="add records of another class, or write a map in which labels that differ in case "
            "only have the same text",
        )

    known = Labels(names)

    def build_example(record: Record, index: int) -> Example:
        filled = _filled(prompt, record)
        candidates = tuple(_after(filled, text) for text in texts)
        row = known.find(label_field, field_value(record, label_field))
        label = None if row is None else texts.index(labels[names[row]])
        return Example(filled, candidates, label, index)

    def label_of(record: Record) -> tuple[str | None, object]:
        value = field_value(record, label_field)
        return label_text(label_field, value), value

    def survey(records: Sequence[Record]) -> BuildExample:
        warn_of_merged(label_field, readable(label_of, records))
        return build_example

    return _Reading("classification", prompt.fields, (label_field,), build_example, survey)


def _multiple_choice(
    prompt: Template,
    label_field: str,
    choices: Sequence[str],
    labels: Sequence[str] | Mapping[str, str] | None,
) -> _Reading:
    """Return how a task reads records that hold the texts to choose from.

    `choices` are templates of the texts, or one field with a list of them. `labels`, if given, are
    what `label_field` holds for the first, second, ... choice.
    """
    if isinstance(labels, Mapping):
        raise UserError(
            "data.labels of a task with data.choices is a map, not a list",
            fix="list the values of data.label_field in the order of the choices, "
            "such as [A, B, C, D]",
        )
    templates = [parse_template("data.choices", choice) for choice in choices]
    prompt_fields = prompt.fields
    for template in templates:
        prompt_fields += template.fields

    known = Labels(labels or ())

    choice_of = partial(read_choice, templates, label_field)

    def build_example(record: Record, index: int, *, are_numbers: bool | None = None) -> Example:
        filled = _filled(prompt, record)
        choice = choice_of(record)
        texts = choice.texts
        if len(texts) < 2 or not all(texts):
            fix = "correct the record, or data.choices"
            if any(text.startswith("[") for text in texts):
                fix = "store lists as lists of JSON or parquet, not as text"
            raise UserError(f"data.choices gives {shown(texts)}, not two or more texts", fix=fix)
        candidates = tuple(_after(filled, text) for text in texts)
        if labels is None:
            label = find_choice(label_field, choice, are_numbers=are_numbers)
        else:
            label = known.find(label_field, field_value(record, label_field))
        return Example(filled, candidates, label, index)

    def survey(records: Sequence[Record]) -> BuildExample:
        # A record with one text, such as a list that is stored as text, is refused by itself.
        choices = [each for each in readable(choice_of, records) if len(each.texts) > 1]
        are_numbers = bool(choices) and labels_are_numbers(label_field, choices)
        return partial(build_example, are_numbers=are_numbers)

    return _Reading(
        "multiple_choice",
        prompt_fields,
        (label_field,),
        build_example,
        None if labels is not None else survey,
    )


def read_choice(templates: Sequence[Template], label_field: str, record: Record) -> Choice:
    """Return the texts that templates of data.choices give of a record, and its label."""
    texts = [text for template in templates for text in template.texts(record)]
    value = field_value(record, label_field)
    return Choice(texts, label_text(label_field, value), type(value) is int)


def _generation(described: Description, prompt: Template, completion: Template | None) -> _Reading:
    """Return how a task reads records with right answers, or with none if a reward judges them."""

    def build_example(record: Record, index: int) -> Example:
        templates = [template for template in (prompt, completion) if template is not None]
        if any(_turns(template, record) for template in templates):
            return _conversation(prompt, completion, record, index, described.system_prompt)
        filled = _filled(prompt, record)
        texts = [] if completion is None else completion.texts(record)
        answers = tuple(text.strip() for text in texts if text.strip())
        gold = answers[:1]  # the one to train on
        label = 0 if answers else None
        if not described.chat_template:
            gold = tuple(f"{_after(filled, text)}\n" for text in gold)
            return Example(filled, gold, label, index, references=answers)
        turns = (Message(USER, filled), *(Message(ASSISTANT, text) for text in gold))
        messages = with_system(turns, described.system_prompt)
        return Example(filled, gold, label, index, references=answers, messages=messages)

    answer_fields = () if completion is None else completion.fields
    return _Reading("generation", prompt.fields, answer_fields, build_example)


def _turns(template: Template | None, record: Record) -> tuple[Message, ...]:
    """Return the turns in the only field of a template, or nothing if it gives text."""
    if template is None or template.pieces != (("", template.fields[0]),):
        return ()
    (field,) = template.fields
    if not are_objects(field_value(record, field)):
        return ()
    return read_messages(record, field)


def _conversation(
    prompt: Template,
    completion: Template | None,
    record: Record,
    index: int,
    system_prompt: str | None,
) -> Example:
    """Return the example of a prompt or an answer that is a list of turns, as in TRL's layout.

    Only the turns of the answer are learned.
    """
    asked = _turns(prompt, record) or (Message(USER, _filled(prompt, record)),)
    answered = _turns(completion, record)
    if not answered and completion is not None:
        texts = [text.strip() for text in completion.texts(record)]
        answered = tuple(Message(ASSISTANT, text) for text in texts[:1] if text)
    trained = [row for row, turn in enumerate(answered) if turn.is_trained]
    answered = answered[: max(trained, default=-1) + 1]  # what follows the last has no use
    gold = tuple(turn.content for turn in answered[-1:])
    context = tuple(turn._replace(weight=0) for turn in asked)
    return Example(
        asked[-1].content,
        gold,
        0 if gold else None,
        index,
        references=gold,
        messages=with_system((*context, *answered), system_prompt),
    )


def _chat(described: Description, field: str) -> _Reading:
    """Return how a task reads conversations, each a list of turns in a field."""
    _refuse_others(
        "messages", described, "prompt", "label_field", "labels", "choices", "completion"
    )

    def build_example(record: Record, index: int) -> Example:
        messages = read_messages(record, field)
        check_tools(record)
        trained = [row for row, message in enumerate(messages) if message.is_trained]
        if not trained:
            return Example(messages[-1].content, (), None, index)
        last = trained[-1]  # what follows it has no use
        asked = "" if last == 0 else messages[last - 1].content
        gold = (messages[last].content,)
        system_prompt = read_system(record) or described.system_prompt
        turns = with_system(messages[: last + 1], system_prompt)
        return Example(asked, gold, 0, index, references=gold, messages=turns)

    return _Reading("chat", (field,), (), build_example)


def _filled(prompt: Template, record: Record) -> str:
    """Return the prompt of a record. UserError: all its fields are empty texts."""
    values = [field_value(record, field) for field in prompt.fields]
    if all(isinstance(value, str) and not value.strip() for value in values):
        raise UserError(f"no text is in {', '.join(prompt.fields)}", fix="fill it in")
    return prompt.fill(record)


def readable(read: Callable[[Record], T], records: Iterable[Record]) -> Iterator[T]:
    """Yield what records hold. Others are refused, with their places, when they are built."""
    for record in records:
        try:
            yield read(record)
        except (KeyError, TypeError, UserError):
            continue


def _after(prompt: str, text: str) -> str:
    """Return a text as it continues a prompt: after a space, unless white space is between them."""
    if prompt[-1:].isspace() or text[:1].isspace():
        return text
    return f" {text}"
