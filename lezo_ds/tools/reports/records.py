"""What a run's directory says of its course, finished or not: what the page's figures are drawn from."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lezo_ds.config import RunConfig, config_from_dict
from lezo_ds.errors import UserError
from lezo_ds.runs.metrics import is_step, read_metrics
from lezo_ds.runs.run_directory import RunDirectory
from lezo_ds.tasks import get_task
from lezo_ds.tools.reports.charts import Point


@dataclass(frozen=True)
class RunRecord:
    """The course of a run.

    Attributes:
        label: its directory's name, with those above it as far as it takes to tell runs apart.
        config: of the run.
        entries: of metrics.jsonl.
        results: of results.json; None until the run has ended once.
        environment: of environment.json.
    """

    label: str
    config: RunConfig
    entries: Sequence[Mapping[str, Any]]
    results: Mapping[str, Any] | None
    environment: Mapping[str, Any]

    @property
    def metric(self) -> str:
        """Name of the task's score."""
        return get_task(self.config.data.task).metric

    @property
    def sparsity(self) -> str:
        """Share, or number, of the blocks that a step leaves out; "" where nothing is perturbed."""
        if self.config.method not in ("lezo", "mezo"):
            return ""
        zo = self.config.zo
        return f"{zo.sparsity:g}" if zo.sparsity is not None else f"{zo.num_dropped_layers} blocks"

    @property
    def learning_rate(self) -> float | None:
        """Of a run that trains."""
        rates = {"lezo": self.config.zo.learning_rate, "mezo": self.config.zo.learning_rate}
        return {**rates, "adamw": self.config.adamw.learning_rate}.get(self.config.method)

    @property
    def seconds_per_step(self) -> float | None:
        """Median time from a step to the next; None for fewer than two in a row."""
        steps = [entry for entry in self.entries if is_step(entry)]
        times = [
            after["seconds"] - before["seconds"]
            for before, after in itertools.pairwise(steps)
            if after["step"] == before["step"] + 1
        ]
        return statistics.median(times) if times else None

    def curve(self, name: str, over: str = "step") -> list[Point]:
        """Return (step or seconds, value) of every entry that has a value of that name."""
        return [(float(e[over]), float(e[name])) for e in self.entries if e.get(name) is not None]


def read_records(paths: Sequence[Path]) -> list[RunRecord]:
    """Return the records of those directories that hold a run.

    Raises:
        UserError: a run's files are damaged.
    """
    found = [path for path in paths if (path / "config.yaml").is_file()]
    return [_read_record(path, label) for path, label in zip(found, _labels(found), strict=True)]


def _read_record(path: Path, label: str) -> RunRecord:
    try:
        config = config_from_dict(yaml.safe_load((path / "config.yaml").read_text()), str(path))
        results, environment = RunDirectory(path).results, path / "environment.json"
        return RunRecord(
            label=label,
            config=config,
            entries=read_metrics(path),
            results=json.loads(results.read_text()) if results.is_file() else None,
            environment=json.loads(environment.read_text()) if environment.is_file() else {},
        )
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(
            f"the run {path} cannot be read",
            got=f"{type(error).__name__}: {error}",
            expected="files as a run writes them",
            fix="leave it out, or start its command again",
        ) from error


def _labels(paths: Sequence[Path]) -> list[str]:
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max((len(names) for names in parts), default=0) + 1):
        labels = ["/".join(names[-count:]) for names in parts]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]
