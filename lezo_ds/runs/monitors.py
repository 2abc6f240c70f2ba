"""DeepSpeed's monitors: TensorBoard, W&B, Comet, and CSV files.

DeepSpeed sends them the numbers of steps and evaluations. This module adds the name of the run, and
an id by which a resumed run continues instead of appearing as a new one. The DeepSpeed JSON and the
environment variables of W&B and Comet take precedence.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lezo_ds.config import RunConfig, dump_yaml
from lezo_ds.distributed.monitors import open_monitors
from lezo_ds.errors import UserError, first_line
from lezo_ds.files import write_output
from lezo_ds.runs.directory import RunDirectory

_SECTIONS = ("csv_monitor", "tensorboard", "wandb", "comet")


def without_monitors(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed JSON with which an engine starts no monitor of its own."""
    return {name: value for name, value in ds_config.items() if name not in _SECTIONS}


def monitor_sections(config: RunConfig, directory: RunDirectory) -> dict[str, Any]:
    """Return the sections of the DeepSpeed JSON that train.report_to stands for."""
    files = {"output_path": str(directory.monitors), "job_name": directory.name}
    settings: dict[str, dict[str, Any]] = {
        "wandb": {"project": os.environ.get("WANDB_PROJECT", "lezo_ds")},
        "comet": {"project": "lezo_ds", "experiment_name": directory.name},
    }
    sections: dict[str, Any] = {}
    for name in config.train.report_to or ():
        section = "csv_monitor" if name == "csv" else name  # of DeepSpeed's JSON
        sections[section] = {"enabled": True, **settings.get(name, files)}
    return sections


class Monitors:
    """The monitors of a run, which are those of rank 0. Other ranks do not start any."""

    def __init__(self) -> None:
        self._deepspeed: Any = None

    def start(
        self, config: RunConfig, directory: RunDirectory, ds_config: Mapping[str, Any]
    ) -> None:
        """Start the monitors of a run and of its DeepSpeed JSON, and show its settings.

        Raises:
            UserError: a monitor cannot start: its package is not installed, or W&B or Comet do not
            know the user.
        """
        sections = {**monitor_sections(config, directory), **ds_config}
        if not sections.keys().isdisjoint(_SECTIONS):
            identify(directory)
        settings = config.model_dump()
        try:
            monitor: Any = open_monitors(sections)
            if monitor.tb_monitor is not None:
                text = f"```yaml\n{dump_yaml(settings)}```"
                monitor.tb_monitor.summary_writer.add_text("settings", text)
            if monitor.wandb_monitor is not None:
                import wandb

                wandb.config.update(settings, allow_val_change=True)
            if monitor.csv_monitor is not None:
                # DeepSpeed would write the header of the files of a resumed run again.
                files = Path(monitor.csv_monitor.log_dir).glob("*.csv")
                monitor.csv_monitor.filenames += [file.stem for file in files]
        except Exception as error:  # each library has types of its own
            raise UserError(
                f"a monitor cannot start: {first_line(error)}",
                fix="install its package, log in to it, set WANDB_MODE=offline or "
                "COMET_START_ONLINE=0, or remove it from train.report_to",
            ) from error
        self._deepspeed = monitor

    def log(self, metrics: Mapping[str, float | bool | None], step: int) -> None:
        """Send the numbers of a step or an evaluation."""
        if self._deepspeed is not None:
            self._deepspeed.write_events(events_of(metrics, step))


def identify(directory: RunDirectory) -> None:
    """Give W&B and Comet the name and the id of a run.

    The id is random, since another run may have been in this directory before.
    """
    path = directory.monitors / "run_id"
    if not directory.journal.exists() or not path.exists():
        write_output(path, uuid.uuid4().hex)
    run_id = path.read_text(encoding="utf-8")
    os.environ.setdefault("WANDB_NAME", directory.name)
    os.environ.setdefault("WANDB_RUN_ID", run_id)
    os.environ.setdefault("WANDB_RESUME", "allow")
    os.environ.setdefault("COMET_EXPERIMENT_KEY", run_id)


def events_of(
    metrics: Mapping[str, float | bool | None], step: int
) -> list[tuple[str, float, int]]:
    """Return numbers as monitors show them: dev/loss for dev_loss, and train/loss for loss."""
    events = []
    for metric, value in metrics.items():
        if value is not None:
            split, _, name = metric.partition("_")
            shown = f"{split}/{name}" if split in ("dev", "test") else f"train/{metric}"
            events.append((shown, float(value), step))
    return events
