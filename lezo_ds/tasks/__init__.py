"""The tasks that can be trained on and scored, by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from lezo_ds.errors import UserError
from lezo_ds.tasks.base import Task
from lezo_ds.tasks.boolq import BOOLQ
from lezo_ds.tasks.cb import CB
from lezo_ds.tasks.copa import COPA
from lezo_ds.tasks.drop import DROP
from lezo_ds.tasks.multirc import MULTIRC
from lezo_ds.tasks.record import RECORD
from lezo_ds.tasks.rte import RTE
from lezo_ds.tasks.squad import SQUAD
from lezo_ds.tasks.sst2 import SST2
from lezo_ds.tasks.wic import WIC
from lezo_ds.tasks.wsc import WSC

_ALL = (SST2, RTE, CB, BOOLQ, WSC, WIC, MULTIRC, COPA, RECORD, SQUAD, DROP)

TASKS: Mapping[str, Task] = {task.name: task for task in _ALL}


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
