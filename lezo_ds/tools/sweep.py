"""A grid of runs, or a search of the best value of one key: a process for each run, resumable, over seeds."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shlex
import signal
import subprocess
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lezo_ds.config import ZEROTH_ORDER, RunConfig, config_to_dict, flatten, load_config
from lezo_ds.config.paths import ROOT
from lezo_ds.errors import DivergenceError, LezoError, UserError
from lezo_ds.files import make_directory, write_atomically
from lezo_ds.runs.results import RunResults
from lezo_ds.runs.signals import on_stop_signals
from lezo_ds.tools.report import DAMAGE, MEASURED, SEEDS, over_seeds, read_runs, recorded_config

KEEP = "train.keep_snapshots"
_SHOWN = [
    "runs",
    "finished",
    "best_dev_loss",
    "test",
    "test_deviation",
    "majority_class",
    "seconds",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep: its values of the grid's keys, configuration and arguments of lezo-ds train."""

    settings: Mapping[str, Any]
    directory: Path
    config: RunConfig
    arguments: tuple[str, ...]

    def is_done(self) -> bool:
        """Return whether the run is finished, as it is configured now."""
        results = RunResults.read(self.directory / "results.json")
        if results is None or not results.finished:
            return False
        try:
            return recorded_config(self.directory) == self.config
        except DAMAGE:  # the run repairs it
            return False


def main(arguments: Namespace) -> None:
    launcher = [*shlex.split(arguments.launcher), str(ROOT / "launch" / "train.py")]
    shared = (arguments.config, arguments.out, tuple(arguments.overrides))
    if arguments.tune is not None:
        print(write_tables(tune(arguments.tune, arguments.grid, *shared, launcher), arguments.out))
        return
    runs = plan_sweep(arguments.grid, *shared)
    if arguments.index is not None:
        run_sweep(runs[arguments.index : arguments.index + 1], launcher)
        return
    try:
        if arguments.list:
            for index, run in enumerate(runs):
                print(f"{index:4d}  {'done' if run.is_done() else 'open'}  {run.directory}")
        else:
            run_sweep(runs, launcher)
    finally:
        print(write_tables(runs, arguments.out))


def plan_sweep(
    grid: Sequence[str], recipe: str, directory: Path, overrides: Sequence[str] = ()
) -> tuple[SweepRun, ...]:
    """Return the runs of a grid, each with a directory named by its values; the last key changes fastest.

    Zeroth-order runs keep no snapshots unless train.keep_snapshots is set: a journal gives back all weights.
    """
    axes = [_parse_axis(text) for text in grid]
    keys = [key for names, _ in axes for key in names] + [
        text.partition("=")[0] for text in overrides
    ]
    for key in keys:
        if key == "run_dir" or keys.count(key) > 1:
            raise UserError(
                f"a sweep cannot set {key} twice, or run_dir at all", fix=f"remove {key}="
            )
    runs: dict[str, SweepRun] = {}
    for values in itertools.product(*(values for _, values in axes)):
        changes = [*overrides]
        changes += [
            f"{key}={value}"
            for (names, _), value in zip(axes, values, strict=True)
            for key in names
        ]
        # The name has the values as they were read: 1e-6 and 0.000001 are the same run.
        flat = flatten(config_to_dict(load_config(recipe, [*changes, f"run_dir={directory}"])))
        name = ",".join(f"{names[0]}={flat[names[0]]}" for names, _ in axes)
        name = re.sub(r"[^\w.+,=-]", "-", name) or "run"
        if name in runs:
            raise UserError(
                f"two runs of the grid are the same: {name}", fix="remove one of the two values"
            )
        run_dir = directory / name
        changes.append(f"run_dir={run_dir}")
        if flat["method"] in ZEROTH_ORDER and KEEP not in keys:
            changes.append(f"{KEEP}=0")
        settings = {key: flat[key] for names, _ in axes for key in names}
        runs[name] = SweepRun(
            settings, run_dir, load_config(recipe, changes), ("--config", recipe, *changes)
        )
    return tuple(runs.values())


def tune(
    key: str,
    grid: Sequence[str],
    recipe: str,
    out: Path,
    overrides: Sequence[str],
    launcher: Sequence[str],
) -> list[SweepRun]:
    """Search the value of a key with the lowest validation loss, and run a grid at this value.

    The search starts at the recipe's value and goes on in steps of a factor of about 3 until the best value
    has a worse one on both sides, with the first values of the grid. All runs that were done are returned.
    """
    start = flatten(config_to_dict(load_config(recipe, [*overrides, f"run_dir={out}"]))).get(key)
    if not isinstance(start, float) or start <= 0:
        raise UserError(
            f"--tune {key} needs a number above 0 to start from", fix=f"set {key} in the recipe"
        )
    overrides = [text for text in overrides if text.partition("=")[0] != key]
    first = [f"{','.join(names)}={values[0]}" for names, values in map(_parse_axis, grid)]
    runs: dict[Path, SweepRun] = {}

    def do(index: int, grid: Sequence[str]) -> pd.DataFrame:
        value = float(f"{start * 10 ** (index / 2):.1g}") if index else start
        planned = plan_sweep([f"{key}={value}", *grid], recipe, out, overrides)
        run_sweep(planned, launcher, may_diverge=True)
        runs.update({run.directory: run for run in planned})
        return results_frame(planned)

    def loss_of(index: int) -> float:
        # Not best_dev_loss: if no value beats the base model, that is the same for all of them.
        (loss,) = do(index, first)["trained_dev_loss"]
        return float("inf") if pd.isna(loss) else float(loss)

    do(best_index(loss_of), grid)
    return list(runs.values())


def best_index(loss_of: Callable[[int], float]) -> int:
    """Return the integer near 0 whose loss is lower than those of both neighbors."""
    losses: dict[int, float] = {}
    best = 0
    while near := [index for index in (best, best - 1, best + 1) if index not in losses]:
        losses.update({index: loss_of(index) for index in near})
        best = min(losses, key=lambda index: losses[index])
    return best


def run_sweep(
    runs: Sequence[SweepRun], launcher: Sequence[str], *, may_diverge: bool = False
) -> None:
    """Do the runs that are not done, one after the other. A run that fails does not stop the others."""
    failures = []
    for run in runs:
        if run.is_done():
            logger.info("%s: done", run.directory.name)
            continue
        log = run.directory.with_name(run.directory.name + ".log")
        logger.info("%s: output in %s", run.directory.name, log)
        make_directory(log.parent)
        code = _launch([*launcher, *run.arguments], log)
        if not run.is_done() and not (may_diverge and code == DivergenceError.exit_code):
            failures.append(f"{run.directory.name} (exit code {code}, see {log})")
    if failures:
        raise LezoError(f"{len(failures)} of {len(runs)} runs failed: {'; '.join(failures)}")


def results_frame(runs: Sequence[SweepRun]) -> pd.DataFrame:
    """Return one row for each run: its name, its settings, and its results if it is done."""
    frame = read_runs([run.directory for run in runs])
    settings = {key: [run.settings[key] for run in runs] for key in runs[0].settings}
    names, done = [run.directory.name for run in runs], [run.is_done() for run in runs]
    frame = frame.assign(run=names, finished=done, **settings)
    frame.loc[~frame["finished"], ["metric", *MEASURED]] = None
    return frame[["run", *settings, "finished", "metric", *MEASURED]]


def write_tables(runs: Sequence[SweepRun], directory: Path) -> str:
    """Write results.csv, a row for each run; return the means over seeds, with the best setting marked."""
    results = results_frame(runs)
    make_directory(directory)
    write_atomically(directory / "results.csv", results.to_csv(index=False))
    keys = [key for key in runs[0].settings if key not in SEEDS]
    summary = over_seeds(results, keys)
    losses = summary.loc[summary["finished"] == summary["runs"], "best_dev_loss"].dropna()
    best = None if losses.empty else losses.idxmin()
    marks = ["lowest validation loss" if index == best else "" for index in summary.index]
    shown = summary[[*keys, *_SHOWN]].assign(**{"": marks})
    text = shown.to_string(index=False, na_rep="-", float_format="{:.4g}".format)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _parse_axis(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names, equals, values = text.partition("=")
    if not equals or not all(names.split(",")) or not all(values.split(",")):
        raise UserError(
            f"{text} is not KEY=VALUE,VALUE,...", fix="for instance zo.learning_rate=1e-6,7e-7"
        )
    return tuple(names.split(",")), tuple(values.split(","))


def _launch(command: Sequence[str], log: Path) -> int:
    """Run a command, append its output to a file, and return the exit code."""
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)  # at the first signal, a run saves its state
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL if len(received) > 1 else signal.SIGTERM)

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
