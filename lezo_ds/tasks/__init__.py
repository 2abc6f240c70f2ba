"""Tasks by name."""

from lezo_ds.tasks.base import Task
from lezo_ds.tasks.mezo import TASKS

__all__ = ["TASKS", "Task"]
