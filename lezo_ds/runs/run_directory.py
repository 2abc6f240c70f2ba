"""The directory of a run: configuration, environment, journal, metrics, snapshots and results."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

import lezo_ds
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, make_directory, write_atomically
from lezo_ds.runs.sharing import shared_command

LIBRARIES = ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "safetensors", "numpy")
"""Libraries whose versions can change the numbers of a run."""

logger = logging.getLogger(__name__)


class RunDirectory:
    """The paths of a run, and every file in it except the journal and the snapshots.

    Attributes:
        stop_file: a user creates this file to stop the run after the current step.
        save_file: a user creates this file to get a snapshot after the current step.
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
        self.trackers = self.path / "trackers"
        self._predictions = self.path / "predictions"
        self._metrics = self.path / "metrics.jsonl"
        self._config = self.path / "config.yaml"
        self._environment = self.path / "environment.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing to the directory, on any host that shares it.

        If the file system has no locks, there is a warning instead.

        Raises:
            UserError: another process holds the lock, or the directory cannot be written.
        """
        path = self.path / ".lock"
        descriptor = self._lock(path)
        try:
            yield
        finally:
            with suppress(OSError):  # the disk may have become read-only; only the lock matters
                path.unlink()
            os.close(descriptor)

    def _lock(self, path: Path) -> int:
        """Return the descriptor of the locked file."""
        while True:
            with refuse_unwritable(f"run_dir {self.path}", option="run_dir"):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(descriptor, 300, 0).decode(errors="replace")
                os.close(descriptor)
                raise UserError(
                    f"run_dir {self.path} is in use",
                    got=f"a second process that writes to it, besides {holder or 'the first'}",
                    expected="one process that trains in a directory",
                    fix=f"wait for its end, stop it (touch {self.stop_file}), or give another run_dir",
                ) from error
            except OSError as error:
                text = "%s is on a file system without locks (%s): start no second process in this directory"
                logger.warning(text, self.path, error.strerror)
                return descriptor
            # The holder may have removed the file between our opening and locking it.
            if _is_file(path, descriptor):
                with suppress(OSError):  # a full disk; the text is only for the message above
                    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
            os.close(descriptor)

    def outputs(self) -> list[Path]:
        """Return what a run left besides its journal or training state, or nothing if it has no output."""
        outputs = [self._metrics, self._predictions, self.results, self.snapshots, self.checkpoints]
        outputs.append(self.trackers)
        if not any(path.exists() for path in outputs):
            return []
        return [path for path in (self._config, self._environment, *outputs) if path.exists()]

    def create(self) -> None:
        """Create the directory.

        Raises:
            UserError: the directory cannot be created or written.
        """
        with refuse_unwritable(f"run_dir {self.path}", option="run_dir"):
            make_directory(self.path)
            write_atomically(self.path / ".writable", "")
            (self.path / ".writable").unlink()

    def write_facts(self, config: dict[str, Any], world_size: int, device: str) -> None:
        """Write config.yaml and environment.json.

        Raises:
            LezoError: a file cannot be written.
        """
        facts = environment(world_size, device)
        _write(self._config, yaml.safe_dump(config, sort_keys=False))
        _write(self._environment, json.dumps(facts, indent=1) + "\n")

    def cut_metrics(self, step: int) -> float:
        """Drop the metrics of all steps after `step` and return the seconds that the run took until then."""
        kept, seconds = [], 0.0
        lines = self._metrics.read_text().splitlines() if self._metrics.is_file() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # a crash cut this line short
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

    def predictions(self, step: int) -> Path:
        """Return the path of the answers to the test examples after `step` steps."""
        return self._predictions / f"step-{step:08}.jsonl"

    def write_predictions(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write the rows of `prediction_rows` for the test examples, one JSON object on each line."""
        path = self.predictions(step)
        with failures_named(path):
            path.parent.mkdir(exist_ok=True)
        _write(path, "".join(json.dumps(row) + "\n" for row in rows))

    def earlier_peak_bytes(self) -> int:
        """Return the peak memory that an earlier process of this run wrote to results.json, 0 if none."""
        try:
            return int(json.loads(self.results.read_text(encoding="utf-8"))["peak_memory_bytes"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0  # no earlier process ended, or its file is damaged and is written anew

    def write_results(self, results: dict[str, Any]) -> None:
        """Write results.json."""
        _write(self.results, json.dumps(results, indent=1) + "\n")


@contextmanager
def refuse_unwritable(what: str, option: str) -> Iterator[None]:
    """Turn an OSError into an error about a path that the user gave.

    Args:
        what: the path, as the message names it.
        option: name of the option that sets the path.

    Raises:
        UserError: instead of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{what} cannot be written to",
            got=str(error),
            expected="a path that can be created and written",
            fix=f"give another {option}",
        ) from error


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def library_versions() -> dict[str, str]:
    """Return the versions of everything that can change the numbers of a run."""
    found = {"python": platform.python_version(), "lezo_ds": lezo_ds.__version__}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def environment(world_size: int, device: str) -> dict[str, Any]:
    """Return the versions, hardware, number of ranks and command (as it may be shared) of this process."""
    import torch  # imported here because tools that only read runs start faster without it

    from lezo_ds.distributed import cpu_name

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "versions": library_versions(),
        "hardware": {"device": device, "gpu": gpu, "cpu": cpu_name(), "cores": os.cpu_count()},
        "platform": platform.platform(),
        "world_size": world_size,
        "threads": torch.get_num_threads(),
        "command": ["python", *shared_command(sys.argv)],
    }


def _write(path: Path, text: str) -> None:
    with failures_named(path):
        write_atomically(path, text)
