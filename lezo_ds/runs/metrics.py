"""What metrics.jsonl says of a run, at its end or while it is going."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lezo_ds.errors import UserError
from lezo_ds.runs.run_directory import RunDirectory

_WINDOW = 50
"""Steps over which the speed is taken."""


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return all lines of a run's metrics.jsonl, oldest first; none if there is no such file."""
    file = _metrics_file(directory)
    return _decode(file.read_bytes())[0] if file.is_file() else []


def is_step(entry: Mapping[str, Any]) -> bool:
    """Return whether a line of metrics.jsonl is of a step; else it is of an evaluation."""
    return "loss" in entry


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    >>> clock(3725.4)
    '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Progress:
    """Turns the lines of metrics.jsonl into lines for people.

    Attributes:
        num_steps: of the whole run; None as long as it is not known.
    """

    def __init__(self) -> None:
        self.num_steps: int | None = None
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)

    def describe(self, entry: Mapping[str, Any]) -> str:
        """Return a line for the next entry: a step's loss, projected gradient, speed and time left."""
        total = "" if self.num_steps is None else f"/{self.num_steps}"
        begin = f"step {entry['step']}{total}"
        if not is_step(entry):
            names = (name for name in entry if name not in ("step", "seconds"))
            return "  ".join([begin, *(f"{name.replace('_', ' ')} {_shown(entry[name])}" for name in names)])
        self._recent.append((entry["step"], entry["seconds"]))
        gradient = entry.get("projected_gradient")
        return "  ".join(
            [
                begin,
                f"loss {_shown(entry['loss'])}",
                *([] if gradient is None else [f"g {gradient:+.3g}"]),
                *([] if entry["applied"] else ["skipped"]),
                *self._speed(),
            ]
        )

    def _speed(self) -> list[str]:
        (first, begin), (last, end) = self._recent[0], self._recent[-1]
        if last <= first or end <= begin:
            return []
        speed = (last - first) / (end - begin)
        left = [] if self.num_steps is None else [f"{clock((self.num_steps - last) / speed)} left"]
        return [f"{speed:.3g} it/s", *left]


class Watcher:
    """Reads what a run adds to its metrics.

    Args:
        path: the run's directory.

    Raises:
        UserError: there is no run.
    """

    def __init__(self, path: Path) -> None:
        if not (path / "config.yaml").is_file() and not _metrics_file(path).is_file():
            raise UserError(
                f"there is no run in {path}",
                got="neither config.yaml nor metrics.jsonl in it",
                expected="the run_dir of a run that has begun",
                fix="give the run_dir of launch/train.py's recipe or command line",
            )
        self._directory = path
        self._progress = Progress()
        self._inode = -1
        self._offset = 0

    def poll(self) -> list[str]:
        """Return a line for each step and evaluation since the last call.

        The first time, and when the run has been resumed (its metrics are then cut back to where it goes on),
        only the evaluations and the last step.
        """
        try:
            with _metrics_file(self._directory).open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                is_new = inode != self._inode
                if is_new:
                    self._inode, self._offset, self._progress = inode, 0, Progress()
                file.seek(self._offset)
                entries, num_bytes = _decode(file.read())
        except FileNotFoundError:
            return []
        self._offset += num_bytes
        self._progress.num_steps = _num_steps(self._directory)
        lines = [self._progress.describe(entry) for entry in entries]
        if not is_new:
            return lines
        last = max((index for index, entry in enumerate(entries) if is_step(entry)), default=-1)
        return [line for i, line in enumerate(lines) if i == last or not is_step(entries[i])]

    def results(self) -> dict[str, Any] | None:
        """Return what the run came to, None while it is going (or was killed)."""
        directory, metrics = RunDirectory(self._directory), _metrics_file(self._directory)
        try:
            # A run that goes on writes its metrics anew, and its results only at the end.
            if directory.results.stat().st_mtime_ns < metrics.stat().st_mtime_ns:
                return None
            results: dict[str, Any] = json.loads(directory.results.read_text())
        except FileNotFoundError:
            return None
        return results


def follow(path: Path, every: float) -> Iterator[str]:
    """Give where a run stands, then a line for each step and evaluation, until the run has ended.

    Args:
        path: the run's directory.
        every: seconds between two looks at its files; 0 looks but once.

    Raises:
        UserError: there is no run.
    """
    watcher = Watcher(path)
    while True:
        results = watcher.results()
        yield from watcher.poll()
        if results is not None:
            yield _end(results)
            return
        if not every:
            return
        time.sleep(every)


def _end(results: Mapping[str, Any]) -> str:
    if not results["finished"]:
        return f"stopped at step {results['steps']}; the same command again resumes it"
    metric, best = results["metric"], results["best_step"]
    return "  ".join(
        [
            f"finished after {clock(results['seconds'])}",
            f"test {metric} {_shown(results['test'])}",
            *([] if best is None else [f"at step {best}"]),
            f"zero-shot {_shown(results['zero_shot'])}",
            f"majority class {_shown(results['majority_class'])}",
        ]
    )


def _metrics_file(directory: Path) -> Path:
    return directory / "metrics.jsonl"


def _decode(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the entries of all whole lines, and how many bytes these take."""
    end = data.rfind(b"\n") + 1
    return [json.loads(line) for line in data[:end].splitlines()], end


def _num_steps(directory: Path) -> int | None:
    file = directory / "config.yaml"
    values = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    steps: int | None = values.get("train", {}).get("steps")
    return steps


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
