"""Tasks that a recipe describes: templates over the fields of a user's own records."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lezo_ds.errors import UserError, cut
from lezo_ds.tasks.base import Example, Message, Record, SplitSizes, Task, TaskKind
from lezo_ds.tasks.conversation import ASSISTANT, USER, read_messages, with_system
from lezo_ds.tasks.metrics import REWARD
from lezo_ds.tasks.template import Template, field_text, field_value, parse_template

CUSTOM = "custom"
"""The name of a task that a recipe describes."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A task as a recipe describes it, by the keys of the section `data`.

    Attributes:
        prompt: template of the text that the model reads first; None if `messages` is given.
        label_field: field with the label; None for a task that generates text.
        labels: the values of the label, or a map from each value to its verbalizer: the text that stands for
            it. For multiple choice, they are the values in the order of the choices.
        choices: templates of the choices, or one template that is a field with a list of texts.
        completion: template of the text to generate. If it is a field with a list, all its texts are right.
            Without it, labels and choices, the task generates texts that only a reward judges.
        messages: field with a conversation. The model learns the assistant's turns.
        chat_template: whether the prompt and the completion are the turns of a user and of the assistant.
        system_prompt: the first turn of each conversation that has no such turn of its own.
        metric: name of the score; None for the one that fits the kind of task.
    """

    prompt: str | None
    label_field: str | None
    labels: Sequence[str] | Mapping[str, str] | None
    choices: Sequence[str] | None
    completion: str | None
    messages: str | None = None
    chat_template: bool = False
    system_prompt: str | None = None
    metric: str | None = None

    @property
    def answers(self) -> dict[str, object]:
        """The keys that say what the model shall answer to data.prompt, with their values."""
        return {
            "data.label_field": self.label_field,
            "data.labels": self.labels,
            "data.choices": self.choices,
            "data.completion": self.completion,
        }

    @property
    def has_only_prompts(self) -> bool:
        """Whether the records have no right answers, so that only a reward can judge answers."""
        return self.messages is None and all(given is None for given in self.answers.values())


_SCORES: Mapping[TaskKind, str] = {"generation": "f1", "chat": "token_accuracy"}
"""The score of a kind of task, if the recipe names none and it is not accuracy."""


def no_answers() -> UserError:
    """Return the error for a description that does not say what is right."""
    return UserError(
        "data.prompt alone does not say what the model shall answer",
        got="neither data.labels, data.choices nor data.completion",
        expected="data.labels (classification), data.choices (multiple choice), data.completion "
        "(generation), or a reward: train.objective=package.module:function",
        fix="add for instance data.label_field and data.labels",
    )


def make_task(described: Description) -> Task:
    """Return the task that a recipe describes.

    It is chat if it has messages, classification if it has labels, multiple choice if it has choices,
    otherwise generation.

    Raises:
        UserError: a template is not valid, or keys are missing or contradict each other.
    """
    if described.messages is not None:
        kind, build, fields = _chat(described, described.messages)
    else:
        prompt = _parse_prompt(described)
        kind, build, fields = _kind_of(described)(described, prompt)
        fields = (*prompt.fields, *fields)
    return Task(
        name=CUSTOM,
        hub_id=None,
        hub_config=None,
        kind=kind,
        fields=dict.fromkeys(fields, object),
        build_example=build,
        has_answers=not described.has_only_prompts,
        metric=described.metric or (REWARD if described.has_only_prompts else _SCORES.get(kind, "accuracy")),
        sizes=SplitSizes(),
    )


def _parse_prompt(described: Description) -> Template:
    if described.system_prompt is not None and not described.chat_template:
        raise UserError(
            "data.system_prompt needs a chat template",
            got="data.chat_template=false",
            expected="data.chat_template=true, or data.messages",
            fix="add data.chat_template: true, or write the text into data.prompt",
        )
    assert described.prompt is not None
    prompt = parse_template("data.prompt", described.prompt)
    if not prompt.fields:
        raise UserError(
            "data.prompt names no field of the records",
            got=described.prompt,
            expected="a template such as {text}",
            fix="put the name of a field in braces",
        )
    return prompt


_Build = Callable[[Record, int], Example]
_Made = tuple[TaskKind, _Build, tuple[str, ...]]
"""A kind of task, its function (record, row) -> Example, and the fields it reads apart from the prompt's."""


def _kind_of(described: Description) -> Callable[[Description, Template], _Made]:
    """Return the function that makes the kind of task that the keys ask for."""
    if described.completion is not None:
        given = [key for key, value in described.answers.items() if value is not None]
        given.remove("data.completion")
        if given:
            raise UserError(
                f"data.completion does not go together with {', '.join(given)}",
                got=f"data.completion and {', '.join(given)}",
                expected="data.completion alone, for a task that generates text",
                fix="remove data.completion, or the others",
            )
        return _generation
    if described.has_only_prompts:
        return _prompts_only
    if described.chat_template:
        raise UserError(
            "data.chat_template needs data.completion, or a reward",
            got="data.labels or data.choices",
            expected="a template of the assistant's turn, such as {answer}",
            fix="write the answer as data.completion, or remove data.chat_template",
        )
    if described.choices is None and described.labels is None:
        raise no_answers()
    if described.label_field is None:
        raise UserError(
            "data.label_field is missing",
            got="null",
            expected="the field of the records that holds the label",
            fix="add it to the section data",
        )
    return _classification if described.choices is None else _multiple_choice


def _classification(described: Description, prompt: Template) -> _Made:
    labels, field = described.labels, described.label_field
    assert labels is not None
    assert field is not None
    # A journal does not keep the order of a map, so the order of the classes must not depend on it.
    words = dict(sorted(labels.items())) if isinstance(labels, Mapping) else {text: text for text in labels}
    if len(words) < 2 or len(set(words.values())) < len(words) or not all(words.values()):
        raise UserError(
            "data.labels must hold two or more labels, each with a text of its own",
            got=", ".join(words.values()) or "no label",
            expected="a list of labels, or a map from each label to its text",
            fix="give each label once, and give each one another text",
        )
    values = tuple(words)
    build = partial(
        _classification_example, prompt=prompt, field=field, values=values, verbalizers=tuple(words.values())
    )
    return "classification", build, (field,)


def _classification_example(
    record: Record,
    index: int,
    *,
    prompt: Template,
    field: str,
    values: Sequence[str],
    verbalizers: Sequence[str],
) -> Example:
    text = prompt.fill(record)
    return Example(
        prompt=text,
        candidates=tuple(_after(text, verbalizer) for verbalizer in verbalizers),
        label=_label(field, field_value(record, field), values),
        index=index,
        null_prompt=prompt.empty,
    )


def _multiple_choice(described: Description, prompt: Template) -> _Made:
    field, values = described.label_field, described.labels
    assert described.choices
    assert field is not None
    if isinstance(values, Mapping):
        raise UserError(
            "data.labels of a task with data.choices must be a list",
            got="a map",
            expected="the values of data.label_field, in the order of the choices, such as [A, B, C, D]",
            fix="write a list, or remove data.labels if the label is a number from 0 or the right text",
        )
    choices = tuple(parse_template("data.choices", text) for text in described.choices)
    build = partial(_choice_example, prompt=prompt, field=field, choices=choices, values=values)
    fields = (field, *(name for choice in choices for name in choice.fields))
    return "multiple_choice", build, fields


def _choice_example(
    record: Record,
    index: int,
    *,
    prompt: Template,
    field: str,
    choices: Sequence[Template],
    values: Sequence[str] | None,
) -> Example:
    text = prompt.fill(record)
    texts = [found for choice in choices for found in _texts(choice, record)]
    if len(texts) < 2 or not all(texts):
        raise UserError(
            "data.choices gives fewer than two texts, or an empty one",
            got=repr(texts)[:80],
            expected="two or more texts",
            fix="correct the record, or data.choices",
        )
    value = field_value(record, field)
    if values is None and type(value) is not int and value not in texts:
        values = [str(position) for position in range(len(texts))]  # a CSV file holds numbers as text
    if values is not None:
        label = _label(field, value, values)
    else:
        label = value if isinstance(value, int) else texts.index(str(value))
    return Example(
        prompt=text,
        candidates=tuple(_after(text, choice) for choice in texts),
        label=label,
        index=index,
        null_prompt=prompt.empty,
    )


def _generation(described: Description, prompt: Template) -> _Made:
    assert described.completion is not None
    completion = parse_template("data.completion", described.completion)
    build: _Build
    if described.chat_template:
        system = described.system_prompt
        build = partial(_answer_example, prompt=prompt, completion=completion, system_prompt=system)
    else:
        build = partial(_generation_example, prompt=prompt, completion=completion)
    return "generation", build, completion.fields


def _generation_example(record: Record, index: int, *, prompt: Template, completion: Template) -> Example:
    text, answers = prompt.fill(record), _answers(completion, record)
    return Example(
        prompt=text,
        candidates=tuple(f"{_after(text, answer)}\n" for answer in answers[:1]),
        label=0 if answers else None,
        index=index,
        references=answers,
    )


def _answer_example(
    record: Record, index: int, *, prompt: Template, completion: Template, system_prompt: str | None
) -> Example:
    """Return a conversation of one question and its answer."""
    text, answers = prompt.fill(record), _answers(completion, record)
    turns = (Message(USER, text), *(Message(ASSISTANT, answer) for answer in answers[:1]))
    return Example(
        prompt=text,
        candidates=answers[:1],
        label=0 if answers else None,
        index=index,
        references=answers,
        messages=with_system(turns, system_prompt),
    )


def _chat(described: Description, field: str) -> _Made:
    given = [key for key, value in described.answers.items() if value is not None]
    given += ["data.prompt"] if described.prompt is not None else []
    if given:
        raise UserError(
            f"data.messages does not go together with {', '.join(given)}",
            got=f"data.messages and {', '.join(given)}",
            expected="data.messages alone, since a conversation holds its prompts and its answers",
            fix="remove data.messages, or the others",
        )
    build = partial(_chat_example, field=field, system_prompt=described.system_prompt)
    return "chat", build, (field,)


def _chat_example(record: Record, index: int, *, field: str, system_prompt: str | None) -> Example:
    messages = read_messages(field, field_value(record, field))
    last = max((place for place, turn in enumerate(messages) if turn.role == ASSISTANT), default=None)
    if last is None:
        return Example(prompt=messages[-1].content, candidates=(), label=None, index=index)
    return Example(
        prompt=messages[last - 1].content if last else "",
        candidates=(messages[last].content,),
        label=0,
        index=index,
        references=(messages[last].content,),
        messages=with_system(messages[: last + 1], system_prompt),
    )


def _answers(completion: Template, record: Record) -> tuple[str, ...]:
    """Return the right answers: none if the record has only empty ones."""
    return tuple(answer for answer in map(str.strip, _texts(completion, record)) if answer)


def _prompts_only(described: Description, prompt: Template) -> _Made:
    build = partial(
        _prompt_example,
        prompt=prompt,
        chat_template=described.chat_template,
        system_prompt=described.system_prompt,
    )
    return "generation", build, ()


def _prompt_example(
    record: Record, index: int, *, prompt: Template, chat_template: bool, system_prompt: str | None
) -> Example:
    text = prompt.fill(record)
    messages = with_system((Message(USER, text),), system_prompt) if chat_template else ()
    return Example(prompt=text, candidates=(), label=None, index=index, messages=messages)


def _texts(template: Template, record: Record) -> list[str]:
    """Return the texts of a template: several if it is one field that holds a list."""
    field = template.only_field
    if field is not None and isinstance(values := field_value(record, field), list):
        return [field_text(field, value) for value in values]
    return [template.fill(record)]


def _label(field: str, value: object, values: Sequence[str]) -> int | None:
    """Return the index of a label among the values; None if the record has no label."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    text = field_text(field, value)
    for found in (text, text.strip()):  # spreadsheets hide spaces at the end of a cell
        if found in values:
            return values.index(found)
    near = difflib.get_close_matches(text, values, n=1)
    raise UserError(
        f"field {field} holds a label that data.labels does not list",
        got=cut(text, 80),
        expected=f"one of {', '.join(values)}",
        fix=f"did you mean {near[0]}?" if near else "correct the record, or add the label to data.labels",
    )


def _after(prompt: str, text: str) -> str:
    """Return a text as it continues a prompt: after a space, unless there is white space between them."""
    return text if prompt[-1:].isspace() or text[:1].isspace() else f" {text}"
