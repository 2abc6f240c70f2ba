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
    """Return the task that a configuration names or describes, with the metric that it asks for."""
    task = described_task(data) if data.task == CUSTOM else TASKS.find(data.task)
    if data.metric is not None:
        task = replace(task, metric=data.metric)
    find_metric(task.metric, task.kind)
    return task


def described_task(data: DataConfig) -> Task:
    """Return the task that a configuration with `data.task` custom describes. Nothing is imported."""
    if data.prompt is None and data.messages is None:
        raise UserError(
            f"data.task={CUSTOM} needs data.prompt or data.messages",
            fix='add a template of the text that the model reads, such as "{text} This ticket is about"',
        )
    if data.train is None and data.path is None:
        raise UserError("a task of your own needs data.train", fix="add data.train=FILE")
    return make_task(Description(**{name: getattr(data, name) for name in (*_DESCRIBING, "metric")}))


def check_data_keys(data: DataConfig, *, has_own_objective: bool) -> None:
    """Refuse keys of the section `data` that contradict each other. Nothing is imported.

    A task without right answers needs an objective of the user's own, which may be a reward.
    """
    if data.task == CUSTOM:
        task = described_task(data)
        if not (task.has_answers or has_own_objective):
            raise no_answers()
    described = [f"data.{name}" for name in _DESCRIBING if getattr(data, name) not in (None, False)]
    if described and data.task != CUSTOM:
        raise UserError(
            f"{', '.join(described)} cannot change data.task={data.task}",
            fix=f"set data.task={CUSTOM}, or none",
        )
    if data.train is None and (data.validation is not None or data.test is not None):
        raise UserError("data.validation and data.test need data.train", fix="add data.train")
    if data.train is not None and data.path is not None:
        raise UserError("data.train and data.path both say where the data is", fix="remove data.path")
