"""DeepSpeed's monitors: TensorBoard, W&B, Comet, and CSV files.

DeepSpeed sends them numbers. This module adds what DeepSpeed leaves out: the name of the run, its
settings and results, and an id by which a resumed run continues instead of appearing as a new one.

    start     before the model is loaded: sections of the DeepSpeed JSON, the run's id, its settings
    log       the numbers of a step or an evaluation, by the names that monitors show
    finish    results.json

The DeepSpeed JSON and the environment variables of W&B and Comet take precedence.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lezo_ds.config import RunConfig, dump_yaml
from lezo_ds.distributed.monitors import open_monitors
from lezo_ds.errors import UserError, first_line, require_package
from lezo_ds.files import write_output
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.results import RunResults

_PROJECT = "lezo_ds"
_SECTIONS = ("csv_monitor", "tensorboard", "wandb", "comet")
_WITH_RUN_ID = ("wandb", "comet")
"""Sections of monitors that would start a new run in each process."""


def without_monitors(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed JSON with which an engine starts no monitor of its own."""
    return {name: value for name, value in ds_config.items() if name not in _SECTIONS}


def monitor_sections(config: RunConfig, directory: RunDirectory) -> dict[str, Any]:
    """Return the sections of the DeepSpeed JSON that train.report_to stands for.

    Raises:
        UserError: the package of a monitor is not installed.
    """
    run_name = _run_name(config, directory)
    files = {"output_path": str(directory.monitors), "job_name": run_name}
    settings: dict[str, Any] = {
        "csv": files,
        "tensorboard": files,
        "wandb": {"project": os.environ.get("WANDB_PROJECT", _PROJECT)},
        "comet": {
            "project": os.environ.get("COMET_PROJECT_NAME", _PROJECT),
            "experiment_name": run_name,
            "samples_log_interval": 1,
        },
    }
    sections: dict[str, Any] = {}
    for name in config.train.report_to or ():
        package = "comet_ml" if name == "comet" else name
        requirement = "'lezo_ds[tensorboard]'" if name == "tensorboard" else package
        require_package(package, f"train.report_to needs the package {package}", requirement)
        section = "csv_monitor" if name == "csv" else name  # of DeepSpeed's JSON
        sections[section] = {"enabled": True, **settings[name]}
    return sections


class Monitors:
    """The monitors of a run, which are those of rank 0. Other ranks do not start any."""

    def __init__(self) -> None:
        self._deepspeed: Any = None

    def start(
        self, config: RunConfig, directory: RunDirectory, ds_config: Mapping[str, Any]
    ) -> None:
        """Start the monitors of a run and of its DeepSpeed JSON, and send them all settings.

        Raises:
            UserError: a monitor cannot start. W&B and Comet may not know the user.
        """
        ds_config = {**monitor_sections(config, directory), **ds_config}
        _identify(config, directory, ds_config)
        settings = config.model_dump()
        try:
            monitor = open_monitors(ds_config)
            if monitor.tb_monitor is not None:
                text = f"```yaml\n{dump_yaml(settings)}```"
                monitor.tb_monitor.summary_writer.add_text("settings", text)
            if monitor.wandb_monitor is not None:
                import wandb

                wandb.config.update(settings, allow_val_change=True)
            if monitor.comet_monitor is not None:
                monitor.comet_monitor.experiment.log_parameters(settings, nested_support=True)
            if monitor.csv_monitor is not None:
                # DeepSpeed would write the header of the files of a resumed run again.
                files = Path(monitor.csv_monitor.log_dir).glob("*.csv")
                monitor.csv_monitor.filenames += [file.stem for file in files]
        except Exception as error:  # each library has types of its own
            raise UserError(
                f"a monitor cannot start: {first_line(error)}",
                fix="log in to it, set WANDB_MODE=offline or COMET_START_ONLINE=0, or remove it "
                "from train.report_to",
            ) from error
        self._deepspeed = monitor

    def log(self, metrics: Mapping[str, float | bool | None], step: int) -> None:
        """Send the numbers of a step or an evaluation."""
        if self._deepspeed is not None:
            self._deepspeed.write_events(events_of(metrics, step))

    def finish(self, results: RunResults) -> None:
        """Send the outcome of a run.

        W&B drops a number of an earlier step, such as the test score of the best step.
        """
        if self._deepspeed is None:
            return
        values = asdict(results)
        if self._deepspeed.wandb_monitor is not None:
            import wandb

            wandb.summary.update(values)
        if self._deepspeed.comet_monitor is not None:
            self._deepspeed.comet_monitor.experiment.log_others(values)


def _identify(config: RunConfig, directory: RunDirectory, ds_config: Mapping[str, Any]) -> None:
    """Give W&B and Comet the name and the id of a run.

    The id is random, since another run may have been in this directory before. The file
    monitors/run_id keeps it.
    """
    if not any(section in ds_config for section in _WITH_RUN_ID):
        return
    path = directory.monitors / "run_id"
    if not directory.has_records() or not path.exists():
        write_output(path, uuid.uuid4().hex)
    run_id = path.read_text(encoding="utf-8")
    for variable, value in {
        "WANDB_NAME": _run_name(config, directory),
        "WANDB_RUN_ID": run_id,
        "WANDB_RESUME": "allow",
        "COMET_EXPERIMENT_KEY": run_id,
    }.items():
        os.environ.setdefault(variable, value)


def events_of(
    metrics: Mapping[str, float | bool | None], step: int
) -> list[tuple[str, float, int]]:
    """Return the numbers of a step or an evaluation as DeepSpeed's monitors take them."""
    return [
        (_monitor_name(name), float(value), step)
        for name, value in metrics.items()
        if value is not None
    ]


def _monitor_name(metric: str) -> str:
    """Return dev/loss where metrics.jsonl has dev_loss, and train/loss where it has loss."""
    split, _, name = metric.partition("_")
    return f"{split}/{name}" if split in ("dev", "test") else f"train/{metric}"


def _run_name(config: RunConfig, directory: RunDirectory) -> str:
    name = Path(config.run_dir).name
    return name if directory.number == 0 else f"{name}-replica-{directory.number}"
