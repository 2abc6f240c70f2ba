"""A grid of runs, such as values around that of a recipe: `lezo-ds sweep`.

Each run is a process of `lezo-ds train` with a directory of its own in the directory of the sweep:

    runs/sweep/results.csv                           a row for each run
    runs/sweep/zo.learning_rate=1e-06,seed=0/        the run with these values
    runs/sweep/zo.learning_rate=1e-06,seed=0.log     its output

A sweep has no state but these files. The same command skips the runs that are finished as they are
configured now, and the others resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import shlex
import signal
import subprocess
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lezo_ds.config import RunConfig, flatten, load_config
from lezo_ds.config.paths import ROOT
from lezo_ds.errors import DivergenceError, LezoError, UserError
from lezo_ds.files import failures_named, make_directory, write_atomically
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.results import RunResults
from lezo_ds.runs.signals import on_stop_signals
from lezo_ds.tools.tables import (
    DAMAGE,
    MEASURED,
    SEEDS,
    kept_apart,
    over_seeds,
    read_runs,
    recorded_config,
)

# Columns of the printed table, after the keys of the grid.
_SHOWN = [
    "runs",
    "finished",
    "best_dev_loss",
    "test",
    "test_deviation",
    "majority_class",
    "seconds",
]

_MAX_NAME = 200
"""Bytes of a run's name. That of a file has at most 255."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        settings: The values of the grid's keys.
        directory: The directory of the run.
        config: The configuration of the run.
        arguments: Arguments of `lezo-ds train` that start the run.
    """

    settings: Mapping[str, Any]
    directory: Path
    config: RunConfig
    arguments: tuple[str, ...]

    def is_done(self) -> bool:
        """Return whether the run is finished, as it is configured now."""
        results = RunResults.read(RunDirectory(self.directory).results)
        if results is None or not results.finished:
            return False
        try:
            recorded = recorded_config(self.directory)
        except DAMAGE:  # the run repairs it
            return False
        # A run in a chat records the day on which it started.
        day = self.config.data.date or recorded.data.date
        data = self.config.data.model_copy(update={"date": day})
        return recorded == self.config.model_copy(update={"data": data})


def main(arguments: Namespace) -> None:
    """Do what the command line asks for, and print the table of all settings."""
    launcher = [*shlex.split(arguments.launcher), str(ROOT / "launch" / "train.py")]
    sweep = (arguments.config, arguments.out, arguments.overrides)
    grid = arguments.grid
    tunes = arguments.tune is not None
    if tunes:
        grid = [values_around(arguments.tune, *sweep), *grid]
    runs = plan_sweep(grid, *sweep)
    index = arguments.index
    if index is not None:
        if not 0 <= index < len(runs):
            problem = f"--index {index} is not the number of a run: the grid has {len(runs)} runs"
            raise UserError(problem, fix=f"give 0 to {len(runs) - 1}; --list shows the runs")
        run_sweep([runs[index]], launcher, may_diverge=tunes)
        return
    try:
        if arguments.list:
            for number, run in enumerate(runs):
                print(f"{number:4d}  {'done' if run.is_done() else 'open'}  {run.directory}")
        else:
            run_sweep(runs, launcher, may_diverge=tunes)
    finally:
        print(write_tables(runs, arguments.out))


def plan_sweep(
    grid: Sequence[str], recipe: str, directory: Path, overrides: Sequence[str] = ()
) -> list[SweepRun]:
    """Return the runs of a grid, in its order: the values of the last key change fastest.

    Zeroth-order runs keep no snapshots unless train.keep_snapshots is set: a journal gives back all
    weights.

    Args:
        grid: Words such as zo.sparsity=0.5,0.75 or seed,data.seed=0,1.
        recipe: The recipe of all runs.
        directory: The directory of the sweep.
        overrides: key=value that change all runs.

    Raises:
        UserError: The grid cannot be run, or a configuration is refused.
    """
    axes = [_parse_axis(word) for word in grid]
    keys = [key for axis_keys, _ in axes for key in axis_keys]
    runs: dict[str, SweepRun] = {}
    for values in itertools.product(*(axis_values for _, axis_values in axes)):
        changes = list(overrides)
        for (axis_keys, _), value in zip(axes, values, strict=True):
            changes += [f"{key}={value}" for key in axis_keys]
        # The name has the values as they were read: 1e-6 and 0.000001 are the same run.
        flat = flatten(load_config(recipe, [*changes, f"run_dir={directory}"]).model_dump())
        name = ",".join(f"{axis_keys[0]}={flat[axis_keys[0]]}" for axis_keys, _ in axes)
        name = re.sub(r"[^\w.+,=-]", "-", name) or "run"
        settings = {key: flat[key] for key in keys}
        is_taken = name in runs and runs[name].settings != settings
        encoded = name.encode()
        if is_taken or len(encoded) > _MAX_NAME:
            # Prompts may be long, or differ in characters that names lack.
            digest = hashlib.sha256(repr(settings).encode()).hexdigest()
            name = f"{encoded[:_MAX_NAME].decode(errors='ignore')}-{digest[:6]}"
        if name in runs:
            problem = f"two runs of the grid are the same: {name}"
            raise UserError(problem, fix="remove one of the two values")
        changes.insert(0, "train.keep_snapshots=0")  # a later value of the key counts instead
        changes.append(f"run_dir={directory / name}")
        runs[name] = SweepRun(
            settings=settings,
            directory=directory / name,
            config=load_config(recipe, changes),
            arguments=("--config", recipe, *changes),
        )
    return list(runs.values())


def values_around(key: str, recipe: str, directory: Path, overrides: Sequence[str] = ()) -> str:
    """Return a word of a grid with five values of a key, from a tenth of the recipe's to ten times.

    The arguments are those of `plan_sweep`. The values have one digit.

    Raises:
        UserError: The recipe has no number above 0 under this key.
    """
    config = load_config(recipe, [*overrides, f"run_dir={directory}"])
    value = flatten(config.model_dump()).get(key)
    if not isinstance(value, float) or value <= 0:
        raise UserError(
            f"--tune {key} needs a number above 0 to start from",
            fix="name a key such as zo.learning_rate, and set it in the recipe",
        )
    values = [f"{value * 10 ** (half_decades / 2):.1g}" for half_decades in range(-2, 3)]
    return f"{key}={','.join(values)}"


def run_sweep(
    runs: Sequence[SweepRun], launcher: Sequence[str], *, may_diverge: bool = False
) -> None:
    """Do the runs that are not done, one after the other.

    A run that fails does not stop the others.

    Args:
        runs: The runs.
        launcher: The command that starts launch/train.py.
        may_diverge: Whether a run that diverges has not failed.

    Raises:
        LezoError: At least one run has failed, or a signal has stopped the sweep.
    """
    failures = []
    for number, run in enumerate(runs, start=1):
        name = run.directory.name
        place = f"{number} of {len(runs)}: {name}"
        if run.is_done():
            logger.info("%s: done", place)
            continue
        log = run.directory.with_name(f"{name}.log")
        logger.info("%s: output in %s", place, log)
        make_directory(log.parent)
        code = _launch([*launcher, *run.arguments], log)
        has_diverged = code == DivergenceError.exit_code
        if not run.is_done() and not (may_diverge and has_diverged):
            failures.append(f"{name} (exit code {code}, see {log})")
    if failures:
        raise LezoError(f"{len(failures)} of {len(runs)} runs failed: {'; '.join(failures)}")


def results_frame(runs: Sequence[SweepRun]) -> pd.DataFrame:
    """Return one row for each run: its name, its settings, and its results if it is done.

    The column `data` tells runs apart that have equal settings and other data (`kept_apart`).
    """
    frame = read_runs([run.directory for run in runs])
    keys = list(runs[0].settings)
    for key in keys:
        frame[key] = [run.settings[key] for run in runs]
    frame["run"] = [run.directory.name for run in runs]
    # A run that was finished with other settings counts as not finished.
    frame["finished"] = [run.is_done() for run in runs]
    frame.loc[~frame["finished"], ["metric", *MEASURED]] = None
    frame["data"] = kept_apart(frame, [key for key in keys if key not in SEEDS])
    return frame[["run", *keys, "data", "finished", "metric", *MEASURED]]


def write_tables(runs: Sequence[SweepRun], directory: Path) -> str:
    """Write results.csv with a row for each run, and return a table with a row for each setting.

    The rows of the table are means over seeds. The setting with the lowest mean validation loss is
    marked, among those whose runs are all finished. Only losses after a step count: the best loss
    of each run that is worse than the base model is that of the base model.
    """
    results = results_frame(runs)
    with failures_named(directory):
        make_directory(directory)
        content = results.drop(columns="data").to_csv(index=False)
        write_atomically(directory / "results.csv", content)
    keys = [key for key in runs[0].settings if key not in SEEDS]
    if results["data"].any():
        keys.append("data")
    summary = over_seeds(results, keys)
    losses = summary.loc[summary["finished"] == summary["runs"], "trained_dev_loss"].dropna()
    marks = pd.Series("", index=summary.index)
    if not losses.empty:
        marks[losses.idxmin()] = "lowest validation loss"
    shown = summary[[*keys, *_SHOWN]].assign(**{"": marks})
    table = shown.to_string(index=False, na_rep="-", float_format="{:.4g}".format)
    return "\n".join(line.rstrip() for line in table.splitlines())


def _parse_axis(word: str) -> tuple[list[str], list[str]]:
    """Return the keys and the values of a word such as seed,data.seed=0,1."""
    left, _, right = word.partition("=")
    keys = left.split(",")
    if re.fullmatch(r"\[[^\[\]]*,[^\[\]]*\]", right):
        right = right[1:-1]  # a list of values, as other programs write it
    values = [value.strip() for value in right.split(",")]
    if "" in keys or "" in values:
        example = "zo.learning_rate=1e-6,7e-7"
        raise UserError(f"{word} is not KEY=VALUE,VALUE,...", fix=f"for instance {example}")
    return keys, values


def _launch(command: Sequence[str], log: Path) -> int:
    """Run a command, append its output to a file, and return the exit code.

    A signal that stops the sweep stops the command, too: at the first one, a run saves its state,
    and the second one kills it.
    """
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        sent = signal.SIGTERM if len(received) == 1 else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)

    with log.open("a") as file:
        try:
            # A session of its own gives the command a process group, which killpg reaches.
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise UserError(
                f"cannot start {command[0]}: {error}", fix="give its full path"
            ) from error
        with on_stop_signals(stop), process:
            process.wait()
    if received:
        raise LezoError(f"stopped by {received[0].name}; the same command continues")
    return process.returncode
