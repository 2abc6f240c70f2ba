"""Tasks by name. To add one: a file with a `Task`, and its name in the line at the end."""

from lezo_ds.registry import Registry
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

TASKS: Registry[Task] = Registry("task", "data.task")
for _task in (SST2, RTE, CB, BOOLQ, WSC, WIC, MULTIRC, COPA, RECORD, SQUAD, DROP):
    TASKS.add(_task.name, _task)
