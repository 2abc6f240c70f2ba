"""Tasks that a recipe describes: templates over the fields of a user's own records."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lezo_ds.errors import UserError, cut
from lezo_ds.tasks.base import Example, Message, Record, Task, TaskKind
from lezo_ds.tasks.metrics import REWARD
from lezo_ds.tasks.template import Template, field_text, field_value, parse_template

CUSTOM = "custom"
"""The name of a task that a recipe describes."""

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"

_METRICS: Mapping[TaskKind, str] = {
    "classification": "accuracy",
    "multiple_choice": "accuracy",
    "generation": "f1",
    "chat": "token_accuracy",
}


@dataclass(frozen=True, kw_only=True)
class Description:
    """The keys of the section `data` that describe a task; lezo_ds/config/schema.py says what they mean."""

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
        return [f"data.{name}" for name in names if getattr(self, name) is not None]


_Built = tuple[TaskKind, tuple[str, ...], Callable[[Record, int], Example]]
"""A kind of task, the fields it reads apart from the prompt's, and its function (record, row) -> Example."""


def make_task(described: Description) -> Task:
    """Return the task that a recipe describes.

    It is chat if it has messages, classification if it has labels, multiple choice if it has choices,
    otherwise generation.
    """
    has_answers = bool(described.keys_set("messages", "label_field", "labels", "choices", "completion"))
    if described.messages is not None:
        _refuse_others("messages", described, "prompt", "label_field", "labels", "choices", "completion")
        prompt_fields: tuple[str, ...] = ()
        kind, fields, build = _chat(described.messages, described.system_prompt)
    else:
        prompt = _parse_prompt(described)
        prompt_fields = prompt.fields
        kind, fields, build = _with_prompt(described, prompt)
    return Task(
        name=CUSTOM,
        hub_id=None,
        hub_config=None,
        kind=kind,
        fields=dict.fromkeys((*prompt_fields, *fields), object),
        build_example=build,
        has_answers=has_answers,
        metric=described.metric or (_METRICS[kind] if has_answers else REWARD),
    )


def no_answers() -> UserError:
    """Return the error for a description that does not say what is right."""
    return UserError(
        "data.prompt alone does not say what the model shall answer",
        fix="add data.label_field and data.labels (classification), data.choices (multiple choice), "
        "data.completion (generation), or a reward: train.objective=package.module:function",
    )


def _refuse_others(name: str, described: Description, *others: str) -> None:
    if both := ", ".join(described.keys_set(*others)):
        raise UserError(
            f"data.{name} and {both} cannot be set together", fix=f"remove data.{name}, or {both}"
        )


def _parse_prompt(described: Description) -> Template:
    if described.system_prompt is not None and not described.chat_template:
        raise UserError(
            "data.system_prompt needs data.chat_template=true or data.messages",
            fix="add data.chat_template: true, or write the text into data.prompt",
        )
    assert described.prompt is not None
    prompt = parse_template("data.prompt", described.prompt)
    if not prompt.fields:
        raise UserError(
            f"data.prompt={described.prompt!r} names no field of the records",
            fix="put the name of a field in braces, such as {text}",
        )
    return prompt


def _with_prompt(described: Description, prompt: Template) -> _Built:
    if described.completion is not None:
        _refuse_others("completion", described, "label_field", "labels", "choices")
        return _generation(described, prompt, parse_template("data.completion", described.completion))
    if not described.keys_set("label_field", "labels", "choices"):
        return _generation(described, prompt, None)
    if described.chat_template:
        raise UserError(
            "data.chat_template needs data.completion or a reward, not data.labels or data.choices",
            fix="write the answer as data.completion, or remove data.chat_template",
        )
    if described.choices is None and described.labels is None:
        raise no_answers()
    if described.label_field is None:
        raise UserError(
            "data.label_field is missing", fix="set it to the field of the records that holds the label"
        )
    if described.choices is not None:
        return _multiple_choice(prompt, described.label_field, described.choices, described.labels)
    assert described.labels is not None
    return _classification(prompt, described.label_field, described.labels)


def _classification(prompt: Template, field: str, labels: Sequence[str] | Mapping[str, str]) -> _Built:
    # A journal does not keep the order of a map, so the order of the classes must not depend on it.
    words = dict(sorted(labels.items())) if isinstance(labels, Mapping) else {text: text for text in labels}
    if len(words) < 2 or len(set(words.values())) < len(words) or not all(words.values()):
        raise UserError(
            f"data.labels={labels} does not hold two or more labels, each with a text of its own",
            fix="write a list of labels, or a map from each label to its text",
        )

    def build(record: Record, index: int) -> Example:
        text = prompt.fill(record)
        candidates = tuple(_after(text, word) for word in words.values())
        label = _label(field, field_value(record, field), tuple(words))
        return Example(text, candidates, label, index, null_prompt=prompt.empty)

    return "classification", (field,), build


def _multiple_choice(
    prompt: Template, field: str, choices: Sequence[str], labels: Sequence[str] | Mapping[str, str] | None
) -> _Built:
    if isinstance(labels, Mapping):
        raise UserError(
            "data.labels of a task with data.choices is a map, not a list",
            fix="list the values of data.label_field in the order of the choices, such as [A, B, C, D]",
        )
    templates = [parse_template("data.choices", text) for text in choices]

    def build(record: Record, index: int) -> Example:
        text = prompt.fill(record)
        texts = [choice for template in templates for choice in template.texts(record)]
        if len(texts) < 2 or not all(texts):
            raise UserError(
                f"data.choices gives {cut(repr(texts), 80)}, not two or more texts",
                fix="correct the record, or data.choices",
            )
        candidates = tuple(_after(text, choice) for choice in texts)
        label = _choice_label(field, field_value(record, field), texts, labels)
        return Example(text, candidates, label, index, null_prompt=prompt.empty)

    return "multiple_choice", (field, *(name for template in templates for name in template.fields)), build


def _choice_label(field: str, value: object, texts: list[str], labels: Sequence[str] | None) -> int | None:
    """Return the index of the right choice: from its label, its number from 0, or its text."""
    if labels is None and type(value) is int:
        return value
    if labels is None and value in texts:
        return texts.index(str(value))
    # A table holds numbers as text.
    return _label(field, value, [str(number) for number in range(len(texts))] if labels is None else labels)


def _generation(described: Description, prompt: Template, completion: Template | None) -> _Built:
    def build(record: Record, index: int) -> Example:
        text = prompt.fill(record)
        texts = [] if completion is None else completion.texts(record)
        answers = tuple(answer for answer in map(str.strip, texts) if answer)
        label = 0 if answers else None
        if not described.chat_template:
            gold = tuple(f"{_after(text, answer)}\n" for answer in answers[:1])
            return Example(text, gold, label, index, references=answers)
        turns = (Message(USER, text), *(Message(ASSISTANT, answer) for answer in answers[:1]))
        messages = _with_system(turns, described.system_prompt)
        return Example(text, answers[:1], label, index, references=answers, messages=messages)

    return "generation", () if completion is None else completion.fields, build


def _chat(field: str, system_prompt: str | None) -> _Built:
    def build(record: Record, index: int) -> Example:
        messages = _read_messages(field, field_value(record, field))
        last = max((row for row, turn in enumerate(messages) if turn.role == ASSISTANT), default=None)
        if last is None:
            return Example(messages[-1].content, (), None, index)
        asked = messages[last - 1].content if last else ""
        gold = (messages[last].content,)
        turns = _with_system(messages[: last + 1], system_prompt)
        return Example(asked, gold, 0, index, references=gold, messages=turns)

    return "chat", (field,), build


def _read_messages(field: str, value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise UserError(
            f'field {field} is {_shown(value)}, not a list such as [{{"role": "user", "content": "Hello"}}]',
            fix="use a .jsonl, .json or .parquet file, and name the field with the list in data.messages",
        )
    return tuple(_read_turn(f"turn {number} of field {field}", turn) for number, turn in enumerate(value, 1))


def _read_turn(where: str, turn: object) -> Message:
    if not isinstance(turn, Mapping) or not {"role", "content"} <= turn.keys():
        raise UserError(f"{where} is {_shown(turn)}, without role and content", fix="rename its keys")
    role, content = turn["role"], turn["content"]
    if role not in (USER, ASSISTANT) and not (role == SYSTEM and where.startswith("turn 1 ")):
        raise UserError(
            f"{where} has the role {_shown(role)}, not {USER} or {ASSISTANT}, or {SYSTEM} in the first turn",
            fix="correct the role, or remove the record",
        )
    if not isinstance(content, str) or (role == ASSISTANT and turn.get("tool_calls")):
        shown = "a call of a tool" if isinstance(content, str) else _shown(content)
        raise UserError(f"the content of {where} is {shown}, not text", fix="correct or remove the record")
    if role == ASSISTANT and not content.strip():
        raise UserError(f"{where} is the assistant's and is empty", fix="fill it in, or remove the record")
    return Message(role, content)


def _with_system(messages: tuple[Message, ...], system_prompt: str | None) -> tuple[Message, ...]:
    if system_prompt is None or messages[0].role == SYSTEM:
        return messages
    return (Message(SYSTEM, system_prompt), *messages)


def _label(field: str, value: object, values: Sequence[str]) -> int | None:
    """Return the index of a label among the values; None if the record has no label."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    text = field_text(field, value)
    for word in (text, text.strip()):  # spreadsheets hide spaces at the end of a cell
        if word in values:
            return values.index(word)
    near = difflib.get_close_matches(text, values, n=1)
    raise UserError(
        f"field {field} is {cut(text, 80)}, which is none of data.labels: {', '.join(values)}",
        fix=f"did you mean {near[0]}?" if near else "correct the record, or add it to data.labels",
    )


def _after(prompt: str, text: str) -> str:
    """Return a text as it continues a prompt: after a space, unless there is white space between them."""
    return text if prompt[-1:].isspace() or text[:1].isspace() else f" {text}"


def _shown(value: object) -> str:
    return cut("null" if value is None else repr(value), 80)
