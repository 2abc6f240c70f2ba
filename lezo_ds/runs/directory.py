"""The directory of a run: configuration, environment, journal, metrics, snapshots and results."""

from __future__ import annotations

import fcntl
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml

import lezo_ds
from lezo_ds.distributed import cpu_name
from lezo_ds.errors import UserError
from lezo_ds.files import DAMAGE, failures_named, make_directory, write_atomically

LIBRARIES = ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "safetensors", "numpy")
"""Libraries whose versions can change the numbers of a run."""
_REPLICAS = "replicas"

logger = logging.getLogger(__name__)


class DirectoryInUseError(UserError):
    """Another process writes to the directory."""


class RunDirectory:
    """The paths of a run, and its small files. `stop_file` and `save_file` are requests of the user."""

    def __init__(self, path: str | Path, number: int = 0) -> None:
        self.path = Path(path, _REPLICAS, str(number)) if number else Path(path)
        self.number = number  # of a replica: the first one has the run's own directory
        self.journal = self.path / "journal.jsonl"
        self.snapshots = self.path / "snapshots"
        self.training_state = self.path / "training_state.json"
        self.checkpoints = self.path / "checkpoints"
        self.stop_file = self.path / "STOP"
        self.save_file = self.path / "SAVE"
        self.results = self.path / "results.json"
        self._predictions = self.path / "predictions"
        self._metrics = self.path / "metrics.jsonl"
        self._facts = (self.path / "config.yaml", self.path / "environment.json")

    def check_writable(self) -> None:
        """Refuse a path where no run can be. Nothing is left there."""
        with failures_named(self.path, UserError):
            existing = next(
                path for path in (self.path, *self.path.absolute().parents) if path.exists()
            )
            tempfile.TemporaryFile(dir=existing).close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the directory, and keep other processes from writing to it, on any host that shares it."""
        with failures_named(self.path, UserError):
            make_directory(self.path)
            # It stays: a file that is removed could be locked twice.
            file = (self.path / ".lock").open("a+", errors="replace")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                fix = f"wait for its end, stop it (touch {self.stop_file}), or set another run_dir"
                text = f"run_dir {self.path} is in use by {file.read(300)}"
                raise DirectoryInUseError(text, fix=fix) from error
            except OSError as error:
                text = "%s is on a file system without locks (%s): start no second process in this directory"
                logger.warning(text, self.path, error.strerror)
            with suppress(OSError):  # a full disk; the text is only for the message above
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
            yield

    def lock(self, lock: ExitStack, *, is_replica: bool) -> RunDirectory:
        """Lock this directory; for a replica, or the first one below it that nobody uses. Return it."""
        for number in itertools.count():
            directory = RunDirectory(self.path, number)
            try:
                lock.enter_context(directory.locked())
                break
            except DirectoryInUseError:
                if not is_replica:
                    raise
        return directory

    def journals(self) -> list[Path]:
        """Return the journals of all replicas."""
        root = self.path.parents[1] if self.number else self.path
        return [path / self.journal.name for path in (root, *root.glob(f"{_REPLICAS}/*"))]

    def outputs(self) -> list[Path]:
        """Return what a run has written besides its journal or training state."""
        outputs = [self._metrics, self._predictions, self.results, self.snapshots, self.checkpoints]
        has_any = any(path.exists() for path in outputs)
        return [path for path in (*self._facts, *outputs) if has_any and path.exists()]

    def set_aside(self, paths: Sequence[Path], reason: str) -> None:
        """Move files of another run to a new folder `earlier-N`."""
        if not paths:
            return
        candidates = (self.path / f"earlier-{number}" for number in itertools.count(1))
        target = next(path for path in candidates if not path.exists())
        with failures_named(target):
            for path in paths:
                moved = target / path.relative_to(self.path)
                make_directory(moved.parent)
                path.rename(moved)
        names = ", ".join(str(path.relative_to(self.path)) for path in paths)
        logger.warning("%s: %s %s; moved to %s", self.path, reason, names, target)

    def write_facts(self, config: dict[str, Any], world_size: int, device: torch.device) -> None:
        """Write config.yaml, and environment.json with versions, hardware, number of ranks and command."""
        facts = {
            "versions": library_versions(),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else cpu_name(),
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            "world_size": world_size,
            "threads": torch.get_num_threads(),
            "command": ["python", *sys.argv],
        }
        config_file, environment_file = self._facts
        self.write(config_file, yaml.safe_dump(config, sort_keys=False))
        self.write_json(environment_file, facts)

    def cut_metrics(self, step: int) -> float:
        """Drop the metrics of all steps after `step` and return the seconds that the run took until then."""
        kept, seconds, damaged = "", 0.0, 0
        lines = self._metrics.read_bytes().splitlines() if self._metrics.is_file() else []
        for line in lines:
            try:
                entry = json.loads(line.decode())
                if entry["step"] <= step:
                    seconds = max(seconds, float(entry["seconds"]))
                    kept += f"{line.decode()}\n"
            except DAMAGE:  # a crash may have cut the last line short
                damaged += line is not lines[-1]
        if damaged:
            logger.warning("%s: %d damaged lines are left out", self._metrics, damaged)
        self.write(self._metrics, kept)
        return seconds

    def log_metrics(self, entry: dict[str, Any]) -> None:
        with failures_named(self._metrics), self._metrics.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def write_predictions(self, step: int, rows: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        self.write(self._predictions / f"step-{step:08}.jsonl", text)

    def write_json(self, path: Path, content: object) -> None:
        self.write(path, json.dumps(content, indent=1) + "\n")

    def write(self, path: Path, text: str) -> None:
        """Replace a file of the run. LezoError: it cannot be written."""
        with failures_named(path):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, text)


def library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "lezo_ds": lezo_ds.__version__}
    return versions | {name: importlib.metadata.version(name) for name in LIBRARIES}
