"""DeepSpeed's monitors: TensorBoard, W&B, Comet, and CSV files.

DeepSpeed sends them numbers. This module adds what DeepSpeed leaves out: the name of the run, its
settings, and an id by which a resumed run continues instead of appearing as a new one.

    train.report_to    monitor_sections    sections of the DeepSpeed JSON
    before the engine  identify_run        environment variables that W&B and Comet read
    once               send_settings       all settings of the run
    each step          events_of           the numbers, by the names that monitors show

The DeepSpeed JSON and the environment variables of W&B and Comet take precedence.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lezo_ds.config import RunConfig, config_to_dict, dump_yaml
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, make_directory, write_atomically
from lezo_ds.runs.directory import RunDirectory

_PROJECT = "lezo_ds"
_WITH_RUN_ID = ("wandb", "comet")
"""Sections of monitors that would start a new run in each process."""


def monitor_sections(config: RunConfig, directory: RunDirectory) -> dict[str, Any]:
    """Return the sections of the DeepSpeed JSON that train.report_to stands for.

    Raises:
        UserError: the package of a monitor is not installed.
    """
    files = {"output_path": str(directory.monitors), "job_name": _run_name(config, directory)}
    # (section of DeepSpeed's JSON, package that it needs, settings) by names in train.report_to.
    monitors: dict[str, tuple[str, str, dict[str, Any]]] = {
        "csv": ("csv_monitor", "csv", files),
        "tensorboard": ("tensorboard", "tensorboard", files),
        "wandb": ("wandb", "wandb", {"project": os.environ.get("WANDB_PROJECT", _PROJECT)}),
        "comet": (
            "comet",
            "comet_ml",
            {
                "project": os.environ.get("COMET_PROJECT_NAME", _PROJECT),
                "experiment_name": _run_name(config, directory),
                "samples_log_interval": 1,
            },
        ),
    }
    sections = {}
    for name in config.train.report_to or ():
        section, package, settings = monitors[name]
        if find_spec(package) is None:
            requirement = "'lezo_ds[tensorboard]'" if package == "tensorboard" else package
            raise UserError(
                f"train.report_to needs the package {package}", fix=f"pip install {requirement}"
            )
        sections[section] = {"enabled": True, **settings}
    return sections


def identify_run(config: RunConfig, directory: RunDirectory, ds_config: Mapping[str, Any]) -> None:
    """Give W&B and Comet the name and the id of a run, by which they continue it. For rank 0.

    The id is random, since another run may have been in this directory before. The file
    monitors/run_id keeps it.
    """
    if not any(section in ds_config for section in _WITH_RUN_ID):
        return
    path = directory.monitors / "run_id"
    with failures_named(path):
        if not directory.has_records() or not path.exists():
            make_directory(path.parent)
            write_atomically(path, uuid.uuid4().hex.encode())
        run_id = path.read_text(encoding="utf-8")
    for variable, value in {
        "WANDB_NAME": _run_name(config, directory),
        "WANDB_RUN_ID": run_id,
        "WANDB_RESUME": "allow",
        "COMET_EXPERIMENT_KEY": run_id,
    }.items():
        os.environ.setdefault(variable, value)


def send_settings(monitor: Any, config: RunConfig) -> None:
    """Send all settings of a run to its monitors. For rank 0.

    Args:
        monitor: DeepSpeed's.
        config: of the run.
    """
    settings = config_to_dict(config)
    if monitor.tb_monitor is not None and monitor.tb_monitor.enabled:
        text = dump_yaml(settings)
        monitor.tb_monitor.summary_writer.add_text("settings", f"```yaml\n{text}```")
    if monitor.wandb_monitor is not None and monitor.wandb_monitor.enabled:
        import wandb

        wandb.config.update(settings, allow_val_change=True)
    if monitor.comet_monitor is not None and monitor.comet_monitor.enabled:
        monitor.comet_monitor.experiment.log_parameters(settings, nested_support=True)


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
