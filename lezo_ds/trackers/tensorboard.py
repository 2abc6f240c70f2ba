"""TensorBoard. The files are in trackers/tensorboard: tensorboard --logdir RUN_DIR shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from lezo_ds.trackers.base import RunFacts, Tracker


class TensorBoard(Tracker):
    """Event files of TensorBoard."""

    library: ClassVar[str | None] = "tensorboard"

    def __init__(self, run: RunFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides what earlier files hold of the steps that are done again.
        purge = run.step + 1 if run.step else None
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a scalar for each value, and flush: a run that is killed does not log it again."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
