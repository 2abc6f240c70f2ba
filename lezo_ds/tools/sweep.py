"""A grid of runs: planned from a recipe, run one after the other or each by itself, compared over seeds."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from lezo_ds.config import (
    ZEROTH_ORDER,
    RunConfig,
    config_from_dict,
    config_to_dict,
    flatten,
    load_config,
    load_yaml,
)
from lezo_ds.errors import LezoError, UserError
from lezo_ds.files import write_atomically
from lezo_ds.tools.logged_command import run_logged
from lezo_ds.tools.reports.results_table import DAMAGE, MEASURED, SEEDS, best_setting, over_seeds, read_runs

State = Literal["done", "begun", "new"]

RESULTS = ["test", "zero_shot", "majority_class", "best_dev_loss", "best_step", "steps", "seconds"]
"""Columns of results.csv after the settings, the state and the metric."""

SUMMARY = ["runs", "finished", "best_dev_loss", "test", "test_deviation", "majority_class", "seconds"]
"""Columns of summary.csv after the settings: means over the finished runs of a setting."""

KEEP = "train.keep_snapshots"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        index: position in the sweep, from 0.
        settings: the values of the grid's keys.
        config: the run's whole configuration; its run_dir is in the sweep's directory.
        arguments: the arguments of lezo-ds train.
    """

    index: int
    settings: Mapping[str, Any]
    config: RunConfig
    arguments: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """Directory of the run; its name tells the settings."""
        return Path(self.config.run_dir)

    @property
    def log(self) -> Path:
        """File with everything that the run printed."""
        return self.directory.with_name(self.directory.name + ".log")

    def state(self) -> State:
        """Return whether the run is done as it is configured now, only begun, or new."""
        try:
            values = load_yaml((self.directory / "config.yaml").read_text())
            results = json.loads((self.directory / "results.json").read_text())
            found = config_from_dict(values, str(self.directory), recorded=True)
            if results["finished"] and _without_snapshots(found) == _without_snapshots(self.config):
                return "done"
        except (UserError, *DAMAGE):
            pass  # also if there is none: the run repairs it
        return "begun" if self.directory.exists() else "new"


def plan_sweep(
    recipe: str, grid: Sequence[str], directory: Path, overrides: Sequence[str] = ()
) -> tuple[SweepRun, ...]:
    """Return the runs of a grid; the last key changes fastest.

    Runs of lezo and mezo keep no snapshots when they have finished, unless the grid or the overrides give
    train.keep_snapshots: a journal gives back all weights.

    Args:
        recipe: name or YAML file of the recipe that the runs share.
        grid: "key=value,value,..." for each key, or "key,key=value,value,..." for keys that change together.
        directory: of the sweep; each run gets a directory in it.
        overrides: `key=value` changes to the recipe, for all runs.

    Raises:
        UserError: as `load_config`, for any of the runs; a key is given twice; two runs are equal.
    """
    axes = [_parse_axis(text) for text in grid]
    keys = [key for names, _ in axes for key in names] + [text.partition("=")[0] for text in overrides]
    for key in keys:
        if key == "run_dir" or keys.count(key) > 1:
            raise UserError(
                f"a sweep cannot set {key} like this",
                got=" ".join([*grid, *overrides]),
                expected="each key once; run_dir follows from the settings",
                fix=f"remove {key}=",
            )
    runs: dict[str, SweepRun] = {}
    for index, values in enumerate(itertools.product(*(values for _, values in axes))):
        given = [*overrides]
        given += [f"{key}={value}" for (names, _), value in zip(axes, values, strict=True) for key in names]
        # The name is made of the values that were read: 1e-6 and 0.000001 are the same run.
        found = flatten(config_to_dict(load_config(recipe, [*given, f"run_dir={directory}"])))
        name = ",".join(f"{names[0]}={found[names[0]]}" for names, _ in axes)
        name = re.sub(r"[^\w.+,=-]", "-", name)
        if name in runs:
            raise UserError(
                "two runs of the grid are the same",
                got=name,
                expected="each value of a key once",
                fix="remove one of the two values",
            )
        given.append(f"run_dir={directory / name}")
        if found["method"] in ZEROTH_ORDER and KEEP not in keys:
            given.append(f"{KEEP}=0")
        runs[name] = SweepRun(
            index=index,
            settings={key: found[key] for names, _ in axes for key in names},
            config=load_config(recipe, given),
            arguments=("--config", recipe, *given),
        )
    return tuple(runs.values())


def select_run(runs: Sequence[SweepRun], index: int) -> SweepRun:
    """Return a run by its index.

    Raises:
        UserError: there is no run with this index.
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
    """Do the runs that are not done, one after the other. A run that fails does not stop the others.

    Args:
        runs: some or all runs of a sweep.
        launcher: the command that starts lezo-ds train, without its arguments.

    Raises:
        UserError: the launcher cannot be started.
        LezoError: runs failed, or a signal came.
    """
    failures = [failure for run in runs if (failure := _do(run, launcher))]
    if failures:
        raise LezoError(f"{len(failures)} of {len(runs)} runs failed: {'; '.join(failures)}")


def results_frame(runs: Sequence[SweepRun]) -> pd.DataFrame:
    """Return one row for each run: its name, settings and state, and its results if it is done.

    The columns are run (the name), the keys of the grid, state, metric, and those of `over_seeds`.
    """
    frame = read_runs([run.directory for run in runs])
    frame["run"] = [run.directory.name for run in runs]
    frame["state"] = [run.state() for run in runs]
    frame["finished"] = frame["state"] == "done"
    for key in runs[0].settings:
        frame[key] = [run.settings[key] for run in runs]
    frame.loc[~frame["finished"], ["metric", *MEASURED]] = None
    return frame[["run", *runs[0].settings, "state", "finished", "metric", *MEASURED]]


def summary_frame(results: pd.DataFrame, settings: Iterable[str]) -> pd.DataFrame:
    """Return one row for each setting: its means over seeds, and whether its validation loss is the lowest.

    Args:
        results: of `results_frame`.
        settings: keys of the grid.
    """
    keys = [key for key in settings if key not in SEEDS]
    summary = over_seeds(results, keys)
    return summary[[*keys, *SUMMARY]].assign(best=summary.index == best_setting(summary))


def write_tables(runs: Sequence[SweepRun], directory: Path) -> str:
    """Write results.csv (a row for each run) and summary.csv (a row for each setting); return the summary.

    The returned text has a line for each setting; the one with the lowest validation loss is marked.
    """
    results = results_frame(runs)
    summary = summary_frame(results, runs[0].settings)
    directory.mkdir(parents=True, exist_ok=True)
    columns = ["run", *runs[0].settings, "state", "metric", *RESULTS]
    write_atomically(directory / "results.csv", results[columns].to_csv(index=False))
    write_atomically(directory / "summary.csv", summary.to_csv(index=False))
    marks = summary.pop("best").map({True: "lowest validation loss", False: ""})
    text = summary.assign(**{"": marks}).to_string(index=False, na_rep="-", float_format="{:.4g}".format)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _without_snapshots(config: RunConfig) -> RunConfig:
    """Return a configuration without the number of snapshots, which changes no result."""
    return replace(config, train=replace(config.train, keep_snapshots=0))


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


def _do(run: SweepRun, launcher: Sequence[str]) -> str | None:
    """Do or finish a run; return what went wrong."""
    name, state = run.directory.name, run.state()
    if state == "done":
        logger.info("run %d, %s: done before", run.index, name)
        return None
    begins = "begins" if state == "new" else "continues"
    logger.info("run %d, %s: %s (all output in %s)", run.index, name, begins, run.log)
    run.directory.parent.mkdir(parents=True, exist_ok=True)
    code = run_logged([*launcher, *run.arguments], run.log)
    if run.state() == "done":
        return None
    return f"{name} ({f'exit code {code}' if code else 'stopped before its end'}, see {run.log})"
