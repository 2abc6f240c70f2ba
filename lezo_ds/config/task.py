"""The task of a configuration: a registered one, one that the recipe describes, or one in a user's module."""

from __future__ import annotations

from dataclasses import replace

from lezo_ds.config.schema import DataConfig
from lezo_ds.errors import UserError
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Task
from lezo_ds.tasks.custom import CUSTOM, Description, make_task, no_answers
from lezo_ds.tasks.metrics import find_metric

_DESCRIBING = (
    *("prompt", "label_field", "labels", "choices", "completion"),
    *("messages", "chat_template", "system_prompt"),
)


def find_task(data: DataConfig) -> Task:
    """Return the task that a configuration names or describes, with the metric that it asks for.

    If `data.task` or `data.metric` is of the form "package.module:NAME", its module is imported.

    Raises:
        UserError: there is no such task or metric, or keys are missing or contradict each other.
    """
    task = described_task(data) if data.task == CUSTOM else TASKS.find(data.task)
    if data.metric is not None:
        task = replace(task, metric=data.metric)
    find_metric(task.metric, task.kind)
    return task


def described_task(data: DataConfig) -> Task:
    """Return the task that a configuration with `data.task` custom describes. Nothing is imported.

    Raises:
        UserError: a template is not valid, or keys are missing or contradict each other.
    """
    if data.prompt is None and data.messages is None:
        raise UserError(
            f"data.task={CUSTOM} needs data.prompt or data.messages",
            got="null",
            expected='a template of the text that the model reads, such as "{text} This ticket is about", or '
            "the field that holds a conversation",
            fix="add data.prompt or data.messages, or name one of the tasks",
        )
    if data.train is None and data.path is None:
        raise UserError(
            "a task of your own needs data.train",
            got="null",
            expected="a file (.csv, .tsv, .json, .jsonl, .parquet), or OWNER/NAME:SPLIT on the hub",
            fix="add data.train=FILE",
        )
    return make_task(
        Description(
            prompt=data.prompt,
            label_field=data.label_field,
            labels=data.labels,
            choices=data.choices,
            completion=data.completion,
            messages=data.messages,
            chat_template=data.chat_template,
            system_prompt=data.system_prompt,
            metric=data.metric,
        )
    )


def check_data_keys(data: DataConfig, *, has_own_objective: bool) -> None:
    """Refuse keys of the section `data` that contradict each other. Nothing is imported.

    Args:
        data: the section.
        has_own_objective: whether `train.objective` names a function of the user's, which may be a reward. A
            task without right answers needs one.

    Raises:
        UserError: the description is not valid (see `described_task`), the keys both name a task and describe
            another one, or they give two locations for the data.
    """
    if data.task == CUSTOM:
        task = described_task(data)
        if not (task.has_answers or has_own_objective):
            raise no_answers()
    given = [f"data.{name}" for name in _DESCRIBING if getattr(data, name) not in (None, False)]
    if given and data.task != CUSTOM:
        raise UserError(
            f"{', '.join(given)} cannot change data.task={data.task}",
            got=f"data.task={data.task}",
            expected=f"data.task={CUSTOM}, or no data.task, for a task that the recipe describes",
            fix=f"remove data.task, or {', '.join(given)}",
        )
    if data.train is None and (data.validation is not None or data.test is not None):
        raise UserError(
            "data.validation and data.test need data.train",
            got="data.train=null",
            expected="a file or a split of the hub",
            fix="add data.train",
        )
    if data.train is not None and data.path is not None:
        raise UserError(
            "data.train and data.path both say where the data is",
            got=f"data.train={data.train}, data.path={data.path}",
            expected="one of them",
            fix="remove data.path",
        )
