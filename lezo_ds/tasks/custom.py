"""Tasks that a recipe describes: templates over the fields of a user's own records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lezo_ds.errors import UserError, cut, did_you_mean
from lezo_ds.tasks.base import Example, Message, Record, Task, TaskKind
from lezo_ds.tasks.metrics import REWARD
from lezo_ds.tasks.template import Template, field_text, field_value, parse_template, shown

CUSTOM = "custom"  # the name of a task that a recipe describes
SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"

_ROLES = {
    "human": USER,
    "gpt": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": TOOL,
    "function": TOOL,
}
"""Roles by their names in ShareGPT's files and in OpenAI's earlier ones."""

_METRICS: Mapping[TaskKind, str] = {
    "generation": "f1",
    "chat": "token_accuracy",
}  # others: accuracy


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


_Built = tuple[
    TaskKind, tuple[str, ...], Callable[[Record, int], Example]
]  # with the fields it reads


def make_task(described: Description) -> Task:
    """Return the task that a recipe describes; its kind follows from the keys that are set."""
    has_answers = bool(described.keys_set("messages", "labels", "choices", "completion"))
    kind, fields, build = (
        _with_prompt(described) if described.messages is None else _chat(described)
    )
    asked = parse_template("data.prompt", described.prompt or "").fields
    answer, labels = (
        fields if described.completion else (described.label_field,),
        described.labels or (),
    )
    return Task(
        name=CUSTOM,
        hub_id=None,
        hub_config=None,
        kind=kind,
        fields=dict.fromkeys(fields, object),
        build_example=build,
        has_answers=has_answers,
        metric=described.metric or (_METRICS.get(kind, "accuracy") if has_answers else REWARD),
        answer_fields=tuple(name for name in answer if name and name not in asked),
        # A journal does not keep the order of a map, so the order of the classes must not depend on it.
        labels=sorted(labels) if isinstance(labels, Mapping) else labels,
    )


def _refuse_others(name: str, described: Description, *others: str) -> None:
    if both := ", ".join(described.keys_set(*others)):
        raise UserError(f"data.{name} and {both} cannot be set together", fix=f"remove {both}")


def _with_prompt(described: Description) -> _Built:
    if described.system_prompt is not None and not described.chat_template:
        fix = "add data.chat_template=true, or write the text into data.prompt"
        raise UserError(
            "data.system_prompt needs data.chat_template=true or data.messages", fix=fix
        )
    assert described.prompt is not None
    prompt = parse_template("data.prompt", described.prompt)
    if not prompt.fields:
        fix = "put the name of a field in braces, such as {text}"
        raise UserError(f"data.prompt={described.prompt!r} names no field of the records", fix=fix)
    if described.completion is not None:
        _refuse_others("completion", described, "label_field", "labels", "choices")
        return _generation(
            described, prompt, parse_template("data.completion", described.completion)
        )
    if not described.keys_set("labels", "choices"):
        return _generation(described, prompt, None)
    if described.label_field is None:
        fix = "set it to the field of the records that holds the label"
        raise UserError("data.label_field is missing", fix=fix)
    if described.choices is not None:
        return _multiple_choice(prompt, described.label_field, described.choices, described.labels)
    assert described.labels is not None
    return _classification(prompt, described.label_field, described.labels)


def _classification(
    prompt: Template, field: str, labels: Sequence[str] | Mapping[str, str]
) -> _Built:
    words = (
        dict(sorted(labels.items()))
        if isinstance(labels, Mapping)
        else {text: text for text in labels}
    )
    if len(words) < 2 or len(set(words.values())) < len(words) or not all(words.values()):
        what = f"data.labels={labels} does not hold two or more labels, each with a text of its own"
        fix = "add records of another class, or give each label a text of its own"
        raise UserError(cut(what, 300), fix=fix)
    first: dict[str, str] = {}
    for word in words.values():
        if (other := first.setdefault(word.strip().casefold(), word)) != word:
            fix = "write them alike in the records, or give each label a text of its own in a map"
            raise UserError(
                f"data.labels has {other!r} and {word!r}, which differ in case only", fix=fix
            )

    def build(record: Record, index: int) -> Example:
        text = prompt.fill(record)
        candidates = tuple(_after(text, word) for word in words.values())
        label = _label(field, field_value(record, field), tuple(words))
        return Example(text, candidates, label, index)

    return "classification", (*prompt.fields, field), build


def _multiple_choice(
    prompt: Template,
    field: str,
    choices: Sequence[str],
    labels: Sequence[str] | Mapping[str, str] | None,
) -> _Built:
    if isinstance(labels, Mapping):
        fix = (
            "list the values of data.label_field in the order of the choices, such as [A, B, C, D]"
        )
        raise UserError("data.labels of a task with data.choices is a map, not a list", fix=fix)
    templates = [parse_template("data.choices", text) for text in choices]

    def build(record: Record, index: int) -> Example:
        text = prompt.fill(record)
        texts = [choice for template in templates for choice in template.texts(record)]
        if len(texts) < 2 or not all(texts):
            fix = "correct the record, or data.choices"
            raise UserError(f"data.choices gives {shown(texts)}, not two or more texts", fix=fix)
        candidates = tuple(_after(text, choice) for choice in texts)
        label = _choice_label(field, field_value(record, field), texts, labels)
        return Example(text, candidates, label, index)

    fields = (*prompt.fields, field, *(name for template in templates for name in template.fields))
    return "multiple_choice", fields, build


def _choice_label(
    field: str, value: object, texts: list[str], labels: Sequence[str] | None
) -> int | None:
    """Return the index of the right choice: from its label, its number from 0, or its text."""
    if labels is None and type(value) is int:
        return value
    if labels is None and value in texts:
        return texts.index(str(value))
    # A table holds numbers as text.
    return _label(
        field, value, [str(number) for number in range(len(texts))] if labels is None else labels
    )


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
        messages = with_system(turns, described.system_prompt)
        return Example(text, answers[:1], label, index, references=answers, messages=messages)

    return (
        "generation",
        (*prompt.fields, *(completion.fields if completion is not None else ())),
        build,
    )


def _chat(described: Description) -> _Built:
    _refuse_others(
        "messages", described, "prompt", "label_field", "labels", "choices", "completion"
    )
    field = str(described.messages)

    def build(record: Record, index: int) -> Example:
        messages = read_messages(field, field_value(record, field))
        last = max((row for row, turn in enumerate(messages) if turn.is_trained), default=None)
        if last is None:
            return Example(messages[-1].content, (), None, index)
        asked = messages[last - 1].content if last else ""
        gold = (messages[last].content,)
        turns = with_system(messages[: last + 1], described.system_prompt)
        return Example(asked, gold, 0, index, references=gold, messages=turns)

    return "chat", (field,), build


def read_messages(field: str, value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise UserError(
            f'field {field} is {shown(value)}, not a list such as [{{"role": "user", "content": "Hello"}}]',
            fix="use a .jsonl, .json or .parquet file, and name the field with the list in data.messages",
        )
    return tuple(
        _read_turn(f"turn {number} of field {field}", turn) for number, turn in enumerate(value, 1)
    )


def _read_turn(where: str, turn: object) -> Message:
    """Return a turn {role, content}, as in OpenAI's files, or {from, value}, as in ShareGPT's."""
    keys = turn if isinstance(turn, Mapping) else {}
    role, weight, calls = (
        keys.get("role") or keys.get("from"),
        keys.get("weight"),
        keys.get("tool_calls"),
    )
    if call := keys.get("function_call"):  # OpenAI's earlier key
        calls = [{"type": "function", "function": call}]
    if not isinstance(role, str) or not (calls or {"content", "value"} & keys.keys()):
        fix = "rename its keys to role and content, or to from and value"
        raise UserError(f"{where} is {shown(turn)}, without role and content", fix=fix)
    role, content = _ROLES.get(role, role), keys.get("content", keys.get("value"))
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and "text" in part for part in content
    ):
        content = "".join(str(part["text"]) for part in content)
    if content is None and (calls or role == TOOL):
        content = ""  # a call needs no text, and a tool may return nothing
    if not isinstance(content, str):
        fix = "correct or remove the record"
        raise UserError(f"the content of {where} is {shown(content)}, not text", fix=fix)
    if weight not in (None, 0, 1):
        raise UserError(
            f"the weight of {where} is {shown(weight)}, not 0 or 1", fix="correct the record"
        )
    others = {
        name: keys[name] for name in ("name", "tool_call_id", "reasoning_content") if keys.get(name)
    }
    read = Message(
        role, content, 0 if weight == 0 else 1, others | ({"tool_calls": calls} if calls else {})
    )
    if read.is_trained and not content.strip() and not calls:
        fix = "fill it in, give it weight 0, or remove the record"
        raise UserError(f"{where} is the assistant's and is empty", fix=fix)
    return read


def with_system(messages: tuple[Message, ...], system_prompt: str | None) -> tuple[Message, ...]:
    if system_prompt is None or messages[0].role in (SYSTEM, "developer"):
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
    raise UserError(
        f"field {field} is {shown(text)}, which is none of data.labels: {cut(', '.join(values), 200)}",
        fix=did_you_mean(text, values, "correct the record, or add it to data.labels"),
    )


def _after(prompt: str, text: str) -> str:
    """Return a text as it continues a prompt: after a space, unless there is white space between them."""
    return text if prompt[-1:].isspace() or text[:1].isspace() else f" {text}"
