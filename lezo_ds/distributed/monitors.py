"""DeepSpeed's monitors: TensorBoard, W&B, Comet, and CSV files.

The DeepSpeed JSON and the environment variables of W&B and Comet take precedence over this module.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster

from lezo_ds.distributed.collectives import on_rank_zero
from lezo_ds.errors import UserError, first_line
from lezo_ds.files import write_output


class Monitors:
    """The monitors of a run. Only rank 0 starts any, and logs to them."""

    def __init__(self, names: Sequence[str], ds_config: dict[str, Any], folder: Path) -> None:
        """Start the monitors of a run and of its DeepSpeed JSON. A collective.

        Args:
            names: of the run's own monitors (train.report_to).
            ds_config: the DeepSpeed JSON. Its sections of monitors are taken out, so that an engine
                does not start them, too.
            folder: where their files are, in the directory of the run.

        Raises:
            UserError: a monitor cannot start: its package is not installed, or W&B or Comet do not
            know the user.
        """
        files = {
            "output_path": str(folder),
            "job_name": folder.parent.name,
        }
        own = {
            "csv_monitor": {"enabled": "csv" in names, **files},
            "tensorboard": {"enabled": "tensorboard" in names, **files},
            "wandb": {"enabled": "wandb" in names, "project": "lezo_ds"},
            "comet": {"enabled": "comet" in names, "project": "lezo_ds"},
        }
        sections = {name: ds_config.pop(name, section) for name, section in own.items()}
        self._config = get_monitor_config(sections)
        on_rank_zero(lambda: self._start(folder))

    def _start(self, folder: Path) -> None:
        if self._config.enabled:
            # By this id, W&B and Comet continue a resumed run instead of showing another one.
            file = folder / "run_id"
            if not file.exists():
                write_output(file, uuid.uuid4().hex)
            run_id = file.read_text()
            os.environ.setdefault("WANDB_NAME", folder.parent.name)
            os.environ.setdefault("WANDB_RUN_ID", run_id)
            os.environ.setdefault("WANDB_RESUME", "allow")
            os.environ.setdefault("COMET_EXPERIMENT_KEY", run_id)
        try:
            self._monitors = MonitorMaster(self._config)
        except Exception as error:  # each library has types of its own
            raise UserError(
                f"a monitor cannot start: {first_line(error)}",
                fix="install its package, log in to it, set WANDB_MODE=offline or "
                "COMET_START_ONLINE=0, or remove it from train.report_to",
            ) from error

    def log(self, metrics: Mapping[str, float | bool | None], step: int) -> None:
        """Send the numbers of a step or an evaluation, by their names in metrics.jsonl."""
        events = [
            (name, float(value), step) for name, value in metrics.items() if value is not None
        ]
        self._monitors.write_events(events)
