"""Tasks that a recipe describes: templates over the fields of a user's own records."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Example, Record, SplitSizes, Task, TaskKind
from lezo_ds.tasks.metrics import REWARD
from lezo_ds.tasks.template import Template, field_text, field_value, parse_template

CUSTOM = "custom"
"""The name of a task that a recipe describes."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A task as a recipe describes it, by the keys of the section `data`.

    Attributes:
        prompt: template of the text that the model reads first.
        label_field: field with the label; None for a task that generates text.
        labels: the values of the label, or a map from each value to its verbalizer: the text that stands for
            it. For multiple choice, they are the values in the order of the choices.
        choices: templates of the choices, or one template that is a field with a list of texts.
        completion: template of the text to generate. If it is a field with a list, all its texts are right.
            Without it, labels and choices, the task generates texts that only a reward judges.
        metric: name of the score; None for the one that fits the kind of task.
    """

    prompt: str
    label_field: str | None
    labels: Sequence[str] | Mapping[str, str] | None
    choices: Sequence[str] | None
    completion: str | None
    metric: str | None

    @property
    def has_only_prompts(self) -> bool:
        """Whether the records have no right answers, so that only a reward can judge answers."""
        return all(given is None for given in (self.completion, self.choices, self.labels, self.label_field))


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

    It is classification if it has labels, multiple choice if it has choices, otherwise generation.

    Raises:
        UserError: a template is not valid, or keys are missing or contradict each other.
    """
    prompt = parse_template("data.prompt", described.prompt)
    if not prompt.fields:
        raise UserError(
            "data.prompt names no field of the records",
            got=described.prompt,
            expected="a template such as {text}",
            fix="put the name of a field in braces",
        )
    kind, build, fields = _kind_of(described)(described, prompt)
    metric = REWARD if described.has_only_prompts else "f1" if kind == "generation" else "accuracy"
    return Task(
        name=CUSTOM,
        hub_id=None,
        hub_config=None,
        kind=kind,
        fields=dict.fromkeys((*prompt.fields, *fields), object),
        build_example=build,
        has_answers=not described.has_only_prompts,
        metric=described.metric or metric,
        sizes=SplitSizes(),
    )


_Build = Callable[[Record, int], Example]
_Made = tuple[TaskKind, _Build, tuple[str, ...]]
"""A kind of task, its function (record, row) -> Example, and the fields it reads besides the prompt's."""


def _kind_of(described: Description) -> Callable[[Description, Template], _Made]:
    """Return the function that makes the kind of task that the keys ask for."""
    if described.completion is not None:
        others = {
            "data.label_field": described.label_field,
            "data.labels": described.labels,
            "data.choices": described.choices,
        }
        given = [key for key, value in others.items() if value is not None]
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
    return "generation", partial(_generation_example, prompt=prompt, completion=completion), completion.fields


def _generation_example(record: Record, index: int, *, prompt: Template, completion: Template) -> Example:
    text = prompt.fill(record)
    answers = tuple(answer for answer in map(str.strip, _texts(completion, record)) if answer)
    return Example(
        prompt=text,
        candidates=tuple(f"{_after(text, answer)}\n" for answer in answers[:1]),
        label=0 if answers else None,
        index=index,
        references=answers,
        null_prompt=prompt.empty,
    )


def _prompts_only(described: Description, prompt: Template) -> _Made:
    return "generation", partial(_prompt_example, prompt=prompt), ()


def _prompt_example(record: Record, index: int, *, prompt: Template) -> Example:
    return Example(prompt=prompt.fill(record), candidates=(), label=None, index=index)


def _texts(template: Template, record: Record) -> list[str]:
    """Return the texts of a template: several if it is one field that holds a list."""
    field = template.only_field
    if field is not None and isinstance(values := field_value(record, field), list):
        return [field_text(field, value) for value in values]
    return [template.fill(record)]


def _label(field: str, value: object, values: Sequence[str]) -> int | None:
    """Return the index of a label among the values; None if the record has no label."""
    if value is None or value == "":
        return None
    text = field_text(field, value)
    if text in values:
        return values.index(text)
    near = difflib.get_close_matches(text, values, n=1)
    raise UserError(
        f"field {field} holds a label that data.labels does not list",
        got=text if len(text) <= 80 else f"{text[:80]}...",
        expected=f"one of {', '.join(values)}",
        fix=f"did you mean {near[0]}?" if near else "correct the record, or add the label to data.labels",
    )


def _after(prompt: str, text: str) -> str:
    """Return a text as it continues a prompt: after a space, unless there is white space between them."""
    return text if prompt[-1:].isspace() or text[:1].isspace() else f" {text}"
