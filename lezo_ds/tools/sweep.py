"""A grid of runs: planned from a recipe, run one after the other or each for itself, compared over seeds."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from lezo_ds.config import RunConfig, config_from_dict, config_to_dict, flatten, load_config
from lezo_ds.errors import LezoError, UserError
from lezo_ds.files import write_atomically
from lezo_ds.tools.logged_command import run_logged

SEED_KEYS = frozenset({"seed", "data.seed"})
"""Runs that differ in these only are repetitions, over which a mean is taken."""

RESULT_COLUMNS = (
    "metric",
    "test",
    "zero_shot",
    "majority_class",
    "best_dev_loss",
    "best_step",
    "steps",
    "seconds",
)
"""What results.csv takes from the results.json of a finished run."""

State = Literal["done", "begun", "new"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        index: its place in the sweep, from 0.
        settings: the values of the grid's keys.
        config: the whole of its configuration; its run_dir lies in the sweep's directory.
        arguments: of launch/train.py.
    """

    index: int
    settings: Mapping[str, Any]
    config: RunConfig
    arguments: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """Where the run lies; its name says its settings."""
        return Path(self.config.run_dir)

    @property
    def log(self) -> Path:
        """Everything the run printed."""
        return self.directory.with_name(self.directory.name + ".log")

    def results(self) -> dict[str, Any] | None:
        """Return what results.json says, or None unless the run is done as it is configured now."""
        try:
            recorded = yaml.safe_load((self.directory / "config.yaml").read_text())
            results: dict[str, Any] = json.loads((self.directory / "results.json").read_text())
            same = config_from_dict(recorded, str(self.directory)) == self.config
        except (FileNotFoundError, UserError):
            return None
        return results if same and results["finished"] else None

    def state(self) -> State:
        """Return whether the run is done, begun, or neither."""
        if self.results() is not None:
            return "done"
        return "begun" if self.directory.exists() else "new"


@dataclass(frozen=True)
class Summary:
    """The runs of a sweep that differ in their seeds only; figures are over those that are done.

    Attributes:
        settings: what they have in common.
        num_runs: how many there are.
        num_done: how many are done.
        metric: what the test measures; "" as long as none is done.
        dev_loss: mean of the lowest validation losses; None if one has none.
        test: mean of the test scores of the steps with the lowest validation loss.
        deviation: their sample standard deviation; None for fewer than two.
        majority_class: mean score of always giving the most frequent label; None where that means nothing.
        seconds: mean duration.
    """

    settings: Mapping[str, Any]
    num_runs: int
    num_done: int
    metric: str
    dev_loss: float | None
    test: float | None
    deviation: float | None
    majority_class: float | None
    seconds: float | None


def plan_sweep(
    recipe: Path, grid: Sequence[str], directory: Path, overrides: Sequence[str] = ()
) -> tuple[SweepRun, ...]:
    """Return the runs of a grid, the last key changing fastest.

    Args:
        recipe: what the runs have in common.
        grid: "key=value,value,..." for each key, or "key,key=value,value,..." for keys that change together.
        directory: of the sweep; each run gets one below it.
        overrides: key=value changes to the recipe, for all runs.

    Raises:
        UserError: as `load_config`, for any of the runs; a key is given twice; two runs are the same.
    """
    axes = [_parse_axis(text) for text in grid]
    keys = [key for names, _ in axes for key in names] + [text.partition("=")[0] for text in overrides]
    for key in keys:
        if key == "run_dir" or keys.count(key) > 1:
            raise UserError(
                f"{key} is given twice" if keys.count(key) > 1 else "run_dir cannot be set in a sweep",
                got=" ".join([*grid, *overrides]),
                expected="each key once; a run's directory follows from its settings",
                fix=f"remove {key}=",
            )
    runs = [
        _plan_run(index, recipe, [names for names, _ in axes], values, directory, overrides)
        for index, values in enumerate(itertools.product(*(values for _, values in axes)))
    ]
    _refuse_equal_names(runs)
    return tuple(runs)


def select_run(runs: Sequence[SweepRun], index: int) -> SweepRun:
    """Return a run by its index.

    Raises:
        UserError: there is none of that index.
    """
    if not 0 <= index < len(runs):
        raise UserError(
            "no such run in the sweep",
            got=f"--index {index}",
            expected=f"0 to {len(runs) - 1}",
            fix=f"sbatch --array=0-{len(runs) - 1}",
        )
    return runs[index]


def listing(runs: Sequence[SweepRun]) -> str:
    """Return a line for each run: its index, its state and its directory."""
    return "\n".join(f"{run.index:4d}  {run.state():5s}  {run.directory}" for run in runs)


def run_sweep(runs: Sequence[SweepRun], launcher: Sequence[str]) -> None:
    """Do the runs that are not done, one after the other; a run that fails does not stop the others.

    Args:
        runs: some or all of a sweep's.
        launcher: the command that starts launch/train.py, up to its arguments.

    Raises:
        UserError: the launcher cannot be started.
        LezoError: runs failed, or a signal came.
    """
    failures = [failure for run in runs if (failure := _do(run, launcher))]
    if failures:
        raise LezoError(f"{len(failures)} of {len(runs)} runs failed: {'; '.join(failures)}")


def summarize(runs: Sequence[SweepRun]) -> tuple[Summary, ...]:
    """Return a summary for each group of runs that differ in their seeds only, in the order of the grid."""
    groups: dict[tuple[tuple[str, Any], ...], list[SweepRun]] = {}
    for run in runs:
        common = tuple((key, value) for key, value in run.settings.items() if key not in SEED_KEYS)
        groups.setdefault(common, []).append(run)
    return tuple(_summary(dict(common), group) for common, group in groups.items())


def best_summary(summaries: Sequence[Summary]) -> Summary | None:
    """Return the one with the lowest validation loss of those whose runs are all done."""
    complete = [s for s in summaries if s.dev_loss is not None and s.num_done == s.num_runs]
    return min(complete, key=lambda summary: summary.dev_loss or 0.0, default=None)


def write_tables(runs: Sequence[SweepRun], directory: Path) -> None:
    """Write results.csv, a line a run, and summary.csv, mean and deviation over the seeds of a setting."""
    lines = []
    for run in runs:
        results = run.results() or {}
        found = {column: results.get(column) for column in RESULT_COLUMNS}
        lines.append({"run": run.directory.name, **run.settings, "state": run.state(), **found})
    summaries = summarize(runs)
    best = best_summary(summaries)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "results.csv", _csv(lines))
    write_atomically(directory / "summary.csv", _csv([_row(s) | {"best": s is best} for s in summaries]))


def table(runs: Sequence[SweepRun]) -> str:
    """Return the summaries as text in columns, the one with the lowest validation loss marked."""
    summaries = summarize(runs)
    best = best_summary(summaries)
    rows = [{name: _shown(value) for name, value in _row(s).items()} for s in summaries]
    columns = list(rows[0])
    lines = [columns, *([row[column] for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    marks = ["", *("  lowest validation loss" if s is best else "" for s in summaries)]
    aligned = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    ]
    return "\n".join(line + mark for line, mark in zip(aligned, marks, strict=True))


def _parse_axis(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names, equals, values = text.partition("=")
    if not equals or not all(names.split(",")) or not all(values.split(",")):
        raise UserError(
            "a part of the grid is not a key and its values",
            got=text,
            expected="key=value,value,... or key,key=value,value,...",
            fix="write for instance zo.learning_rate=1e-6,7e-7",
        )
    return tuple(names.split(",")), tuple(values.split(","))


def _plan_run(
    index: int,
    recipe: Path,
    axes: Sequence[tuple[str, ...]],
    values: Sequence[str],
    directory: Path,
    overrides: Sequence[str],
) -> SweepRun:
    changes = [f"{key}={value}" for keys, value in zip(axes, values, strict=True) for key in keys]
    given = [*overrides, *changes]
    # What a key comes to does not depend on how it was written: 1e-6 and 0.000001 are the same run.
    found = flatten(config_to_dict(load_config(recipe, [*given, f"run_dir={directory}"])))
    name = re.sub(r"[^\w.+,=-]", "-", ",".join(f"{keys[0]}={found[keys[0]]}" for keys in axes))
    arguments = [*given, f"run_dir={directory / name}"]
    return SweepRun(
        index=index,
        settings={key: found[key] for keys in axes for key in keys},
        config=load_config(recipe, arguments),
        arguments=("--config", str(recipe), *arguments),
    )


def _refuse_equal_names(runs: Sequence[SweepRun]) -> None:
    seen: set[Path] = set()
    for run in runs:
        if run.directory in seen:
            raise UserError(
                "two runs of the grid are the same",
                got=run.directory.name,
                expected="each value of a key once",
                fix="remove one of the two values",
            )
        seen.add(run.directory)


def _do(run: SweepRun, launcher: Sequence[str]) -> str | None:
    """Do or finish a run; return what went wrong."""
    name = run.directory.name
    state = run.state()
    if state == "done":
        logger.info("run %d, %s: done before", run.index, name)
        return None
    logger.info("run %d, %s: %s (all output in %s)", run.index, name, _BEGINS[state], run.log)
    run.directory.parent.mkdir(parents=True, exist_ok=True)
    code = run_logged([*launcher, *run.arguments], run.log)
    if run.state() == "done":
        return None
    return f"{name} ({f'exit code {code}' if code else 'stopped before its end'}, see {run.log})"


_BEGINS = {"new": "begins", "begun": "continues"}


def _summary(settings: Mapping[str, Any], runs: Sequence[SweepRun]) -> Summary:
    done = [results for run in runs if (results := run.results()) is not None]
    tests = _column(done, "test")
    return Summary(
        settings=settings,
        num_runs=len(runs),
        num_done=len(done),
        metric=done[0]["metric"] if done else "",
        dev_loss=_mean(_column(done, "best_dev_loss")),
        test=_mean(tests),
        deviation=statistics.stdev(tests) if len(tests) > 1 else None,
        majority_class=_mean(_column(done, "majority_class")),
        seconds=_mean(_column(done, "seconds")),
    )


def _column(done: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return one number of every run, or nothing if one has none."""
    values = [results[name] for results in done]
    return [] if None in values else values


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _row(summary: Summary) -> dict[str, Any]:
    return {
        **summary.settings,
        "runs": f"{summary.num_done}/{summary.num_runs}",
        "validation loss": summary.dev_loss,
        "metric": summary.metric,
        "test": summary.test,
        "deviation": summary.deviation,
        "majority class": summary.majority_class,
        "seconds": summary.seconds,
    }


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) and not math.isinf(value) else str(value)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
