"""Where a run sends its metrics besides metrics.jsonl, by name: what `train.report_to` takes.

To add one: a file with a subclass of `Tracker`, and a line here. A tracker imports its library when it is
opened, so only runs that ask for it need it.
"""

from lezo_ds.registry import Registry
from lezo_ds.trackers.base import RunFacts, Tracker
from lezo_ds.trackers.csv_file import CsvFile
from lezo_ds.trackers.tensorboard import TensorBoard
from lezo_ds.trackers.trackio import Trackio
from lezo_ds.trackers.wandb import Wandb

__all__ = ["TRACKERS", "RunFacts", "Tracker"]

TRACKERS: Registry[type[Tracker]] = Registry("tracker", "train.report_to")
TRACKERS.add("csv", CsvFile)
TRACKERS.add("tensorboard", TensorBoard)
TRACKERS.add("trackio", Trackio)
TRACKERS.add("wandb", Wandb)
