"""The tasks that can be trained on and scored, by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Task
from lezo_ds.tasks.sst2 import SST2

TASKS: Mapping[str, Task] = {task.name: task for task in (SST2,)}


def get_task(name: str) -> Task:
    """Return the task called `name`, in upper or lower case.

    Raises:
        UserError: there is no such task; names the nearest one.

    >>> get_task("SST2").hub_id
    'nyu-mll/glue'
    """
    task = TASKS.get(name.lower())
    if task is not None:
        return task
    near = difflib.get_close_matches(name.lower(), TASKS, n=1)
    raise UserError(
        "unknown task",
        got=name,
        expected="one of " + ", ".join(sorted(TASKS)),
        fix=f"did you mean {near[0]}?" if near else "set data.task to one of these",
    )
