"""The directory of a run: its paths, its lock, and its small files.

Rank 0 writes all of it:

    .lock                     held by the process that writes here
    config.yaml               the configuration of the last start
    journal.jsonl             the records of the run (run.py)
    snapshots/step-N/         a model in the format of transformers or peft
    predictions/step-N.jsonl  the answers to the test examples
    samples.jsonl             some answers of each evaluation, with their rewards
    metrics.jsonl             a line for each step and each evaluation
    results.json              the outcome (results.py)
    lm_eval.jsonl             a line for each `lezo-ds evaluate --lm-eval` of the weights
    monitors/                 files of train.report_to (distributed/monitors.py)
    STOP                      the user makes this file to ask for a stop
    earlier-N/                snapshots of another run that were here
    replicas/N/               all this again for replica N > 0 (replicas)
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import lezo_ds
from lezo_ds.config import RunConfig, dump_yaml
from lezo_ds.errors import UserError
from lezo_ds.files import DAMAGE, failures_named, make_directory, write_output

LIBRARIES = ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "safetensors", "numpy")
"""Libraries whose versions can change the numbers of a run."""
_REPLICAS = "replicas"

logger = logging.getLogger(__name__)


class DirectoryInUseError(UserError):
    """Another process writes to the directory."""


class RunDirectory:
    """The paths of a run, or of one replica in it, and its small files.

    Attributes:
        path: the directory.
        number: of the replica. Replica 0 has the run's own directory.
        name: of the run and, of others than replica 0, the replica.
        journal, results, config, metrics, samples, harness_scores: files of these names.
        snapshots, predictions, monitors: folders of these names.
        stop_file: by which the user asks for a stop.
    """

    def __init__(self, path: str | Path, number: int = 0) -> None:
        self.path = Path(path)
        self.name = self.path.name
        if number > 0:
            self.name += f"-replica-{number}"
            self.path = self.path / _REPLICAS / str(number)
        self.number = number
        self.journal = self.path / "journal.jsonl"
        self.snapshots = self.path / "snapshots"
        self.stop_file = self.path / "STOP"
        self.results = self.path / "results.json"
        self.monitors = self.path / "monitors"
        self.predictions = self.path / "predictions"
        self.samples = self.path / "samples.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.config = self.path / "config.yaml"
        self.harness_scores = self.path / "lm_eval.jsonl"

    @contextmanager
    def locked(self, *, needs_lock: bool = False) -> Iterator[None]:
        """Create the directory, and keep other processes from writing to it.

        They may be on any host that shares the file system.

        Args:
            needs_lock: whether to refuse a file system without locks. Else there is only a warning.

        Raises:
            DirectoryInUseError: another process holds the lock.
            UserError: the directory cannot be made, or cannot be locked and `needs_lock`.
        """
        with failures_named(self.path, UserError):
            make_directory(self.path)
            # It stays: a file that is removed could be locked twice.
            # In a run of someone else, it may be a link to a file elsewhere.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            file = os.fdopen(os.open(self.path / ".lock", flags, 0o666), "r+", errors="replace")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise DirectoryInUseError(
                    f"run_dir {self.path} is in use by {file.read(300)}",
                    fix=f"wait for its end, stop it (touch {self.stop_file}), or "
                    "set another run_dir",
                ) from error
            except OSError as error:  # such as ENOLCK of NFS, or ENOSYS of Lustre without -o flock
                problem = f"{self.path} is on a file system without locks ({error.strerror})"
                if needs_lock:
                    raise UserError(
                        f"{problem}, which replicas need",
                        fix="mount it with locks (Lustre: -o flock), or set run_dir on another one",
                    ) from error
                logger.warning("%s: start no second process in this directory", problem)
            with suppress(OSError):  # a full disk; the text is only for the message above
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
            yield

    def lock(self, stack: ExitStack, *, is_replica: bool) -> RunDirectory:
        """Lock this directory until the stack is closed, and return it.

        A replica locks the first one that no other replica uses: this one, replicas/1, replicas/2
        and so on. Without locks, all replicas would take this one and write the same journal.
        """
        number = 0
        while True:
            directory = RunDirectory(self.path, number)
            try:
                stack.enter_context(directory.locked(needs_lock=is_replica))
                return directory
            except DirectoryInUseError:
                if not is_replica:
                    raise
                number += 1

    def stop_files(self) -> list[Path]:
        """Return the files STOP of all replicas. Each of them stops all."""
        root = self.path.parents[1] if self.number > 0 else self.path
        name = self.stop_file.name
        paths = [root / name, *root.glob(f"{_REPLICAS}/*/{name}")]
        return [path for path in paths if path.exists()]

    def outputs(self) -> list[Path]:
        """Return what a run has written after it has started its journal."""
        outputs = [
            self.config,
            self.metrics,
            self.samples,
            self.predictions,
            self.results,
            self.snapshots,
        ]
        return [path for path in outputs if path.exists()]

    def set_aside(self, paths: Sequence[Path]) -> None:
        """Move snapshots of another run, or of unrecorded steps, to a new folder `earlier-N`."""
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
        logger.warning("%s had %s before this run; moved to %s", self.path, names, target)

    def write_config(self, config: RunConfig) -> None:
        """Write config.yaml, which is a recipe: it has either train.steps or train.epochs."""
        if config.train.epochs is not None:
            config = config.with_section("train", steps=None)
        write_output(self.config, dump_yaml(config.model_dump()))

    def cut_logs(self, step: int, evaluated: Collection[tuple[str, int]]) -> float:
        """Drop from metrics.jsonl and samples.jsonl what will be done again, and damaged lines.

        Log lines are written before the journal records the evaluation, so a kill cannot lose them.

        Args:
            step: the number of steps that the run has done.
            evaluated: the split and the step of each evaluation that is recorded.

        Returns:
            The seconds that the run took until `step`.
        """
        seconds = 0.0
        for path in filter(Path.is_file, (self.metrics, self.samples)):
            kept = []
            for line in path.read_bytes().splitlines():
                with suppress(*DAMAGE):  # a crash cuts the last line short
                    entry = json.loads(line.decode())
                    if _is_done(entry, step, evaluated):
                        seconds = max(seconds, float(entry.get("seconds", 0)))
                        kept.append(line + b"\n")
            write_output(path, b"".join(kept))
        return seconds

    def log_metrics(self, entry: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        append_lines(self.metrics, [entry])

    def log_samples(self, step: int, split: str, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append the answers that an evaluation shows to samples.jsonl."""
        where = {"step": step, "split": split}
        append_lines(self.samples, [{**where, **sample} for sample in samples])

    def predictions_at(self, step: int) -> Path:
        """Return the file of `write_predictions`."""
        return self.predictions / f"step-{step:08}.jsonl"

    def write_predictions(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write the answers to the test examples by the weights after `step` steps."""
        lines = [json.dumps(row) + "\n" for row in rows]
        write_output(self.predictions_at(step), "".join(lines))

    def write_json(self, path: Path, content: object) -> None:
        """Replace a JSON file of the run. LezoError: it cannot be written."""
        write_output(path, json.dumps(content, indent=1) + "\n")


def _is_done(entry: Mapping[str, Any], step: int, evaluated: Collection[tuple[str, int]]) -> bool:
    """Return whether a line of a log is of what a run has done, up to a step."""
    number = entry["step"]
    splits = [
        split
        for split in ("dev", "test")
        if f"{split}_loss" in entry or entry.get("split") == split
    ]
    return number <= step and all((split, number) in evaluated for split in splits)


def append_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines to a file of a run, without a sync. LezoError: it cannot be written."""
    with failures_named(path), path.open("a") as file:
        for entry in entries:
            file.write(json.dumps(entry) + "\n")


def library_versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of LIBRARIES."""
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), "lezo_ds": lezo_ds.__version__, **libraries}
