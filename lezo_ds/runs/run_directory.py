"""A run is a directory: config, environment, journal, metrics, snapshots, results."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import yaml

import lezo_ds
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, make_directory, write_atomically

LIBRARIES = (
    "torch",
    "deepspeed",
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
)


class RunDirectory:
    """Paths of a run, and what is written there besides the journal and the snapshots.

    Attributes:
        stop_file: whoever makes it asks the run to stop after the step in flight.
        save_file: whoever makes it asks for a snapshot after the step in flight.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.journal = self.path / "journal.jsonl"
        self.snapshots = self.path / "snapshots"
        self.training_state = self.path / "training_state.json"
        self.checkpoints = self.path / "checkpoints"
        self.results = self.path / "results.json"
        self.stop_file = self.path / "STOP"
        self.save_file = self.path / "SAVE"
        self._metrics = self.path / "metrics.jsonl"

    def create(self) -> None:
        """Make the directory.

        Raises:
            UserError: it cannot be made or written to.
        """
        try:
            make_directory(self.path)
            write_atomically(self.path / ".writable", "")
            (self.path / ".writable").unlink()
        except OSError as error:
            raise UserError(
                f"run_dir {self.path} cannot be written to",
                got=str(error),
                expected="a directory that can be made and written",
                fix="give another run_dir",
            ) from error

    def write_facts(self, config: dict[str, Any], world_size: int, device: str) -> None:
        """Write config.yaml and environment.json.

        Raises:
            LezoError: they cannot be written.
        """
        facts = environment(world_size, device)
        _write(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False))
        _write(self.path / "environment.json", json.dumps(facts, indent=1) + "\n")

    def cut_metrics(self, step: int) -> float:
        """Drop the metrics of steps that will be done again; return the seconds trained until then."""
        kept, seconds = [], 0.0
        lines = self._metrics.read_text().splitlines() if self._metrics.is_file() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # the line a crash cut short
                continue
            if entry["step"] <= step:
                kept.append(line)
                seconds = entry["seconds"]
        _write(self._metrics, "".join(line + "\n" for line in kept))
        return seconds

    def log_metrics(self, entry: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        with failures_named(self._metrics), self._metrics.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def write_results(self, results: dict[str, Any]) -> None:
        """Write results.json."""
        _write(self.results, json.dumps(results, indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    with failures_named(path):
        write_atomically(path, text)


def library_versions() -> dict[str, str]:
    """Return the versions of what the numbers of a run depend on."""
    found = {"python": platform.python_version(), "lezo_ds": lezo_ds.__version__}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def environment(world_size: int, device: str) -> dict[str, Any]:
    """Return what a run was made on: versions, hardware, ranks, command."""
    import torch  # not above: tools that only read runs start faster without it

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "versions": library_versions(),
        "hardware": {"device": device, "gpu": gpu, "cpu": platform.processor(), "cores": os.cpu_count()},
        "platform": platform.platform(),
        "world_size": world_size,
        "threads": torch.get_num_threads(),
        "command": ["python", *sys.argv],
    }
