"""A grid of runs, such as values around that of a recipe, one after the other.

    python launch/sweep.py --config RECIPE --out runs/sweep \
        --grid zo.learning_rate=1e-6,7e-7 zo.sparsity=0.5,0.75 seed,data.seed=0,1,2,3,4
    python launch/sweep.py --config demo --out runs/tuned --tune zo.learning_rate --grid seed=0,1,2

Each run is a process of launch/train.py with a directory of its own in that of the sweep:

    runs/sweep/results.csv                           a row for each run
    runs/sweep/zo.learning_rate=1e-06,seed=0/        the run with these values
    runs/sweep/zo.learning_rate=1e-06,seed=0.log     its output

A sweep has no state but these files. The same command skips the runs that are finished, and the
others resume. If the first run is refused, the others are not started. Keys that are joined by
commas change together, and key=value applies to all runs. --tune adds five values of a key to the
grid, from a tenth of the recipe's to ten times; some may diverge. Runs keep no weights unless
train.keep_snapshots is set: their journals reconstruct them.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from lezo_ds.cli import end_process_after
from lezo_ds.config import RunConfig, flatten, load_config
from lezo_ds.config.paths import ROOT
from lezo_ds.errors import DivergenceError, LezoError, UserError
from lezo_ds.files import failures_named, make_directory, write_output
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.runs.results import RunResults
from lezo_ds.runs.signals import on_stop_signals
from lezo_ds.tools.report import as_text, name_runs, read_runs, score_tables

_MAX_NAME = 200  # bytes of a run's name: that of a file has at most 255
_TUNED = (0.1, 0.3, 1, 3, 10)  # times the value of a recipe
_LAST_LINES = 3  # of the output of a run that failed

logger = logging.getLogger(__name__)


class Run(NamedTuple):
    """A run of a sweep: the values of the grid's keys, its directory, and its configuration."""

    settings: dict[str, Any]
    directory: Path
    arguments: list[str]
    config: RunConfig

    def is_done(self) -> bool:
        """Return whether the run is finished, as it is configured now."""
        run = RunDirectory(self.directory)
        results = RunResults.read(run.results)
        if results is None or not results.finished:
            return False
        recorded = load_config(run.config).model_dump()
        recorded["data"]["date"] = self.config.data.date  # a run in a chat records its day
        return recorded == self.config.model_dump()


def read_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--config", required=True, help="a YAML file, or the name of a shipped recipe")
    add("--out", type=Path, required=True, help="directory of the sweep")
    add(
        "--grid",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE,...",
        help="a key and its values",
    )
    add("--tune", help="a key: try 1/10, 1/3, 1, 3 and 10 times its value")
    add(
        "--launcher",
        type=shlex.split,
        default=[sys.executable],
        help="such as 'deepspeed --num_gpus 2'",
    )
    add("--index", type=int, help="run only this one, and write no table")
    add("--list", action="store_true", help="only list the runs, and write the table")
    add("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args()


def plan(arguments: argparse.Namespace) -> Iterator[Run]:
    """Yield the runs of a grid, in its order: the values of the last key change fastest."""
    grid = list(arguments.grid)
    common = ["train.keep_snapshots=0", *arguments.overrides, f"run_dir={arguments.out}"]
    if arguments.tune is not None:
        value = flatten(load_config(arguments.config, common).model_dump()).get(arguments.tune)
        if not isinstance(value, float):
            problem = f"--tune {arguments.tune} is not a key whose value is a decimal number"
            raise UserError(problem, fix="name one, such as zo.learning_rate")
        tried = ",".join(f"{value * factor:.12g}" for factor in _TUNED)
        grid.insert(0, f"{arguments.tune}={tried}")
    keys = [key for word in grid for key in word.partition("=")[0].split(",")]
    fixed = {word.partition("=")[0] for word in arguments.overrides} - {arguments.tune}
    given = ["run_dir", *keys, *fixed]
    for key in given:
        if given.count(key) > 1:
            problem = f"{key} is set twice, by --out, --tune, --grid or key=value"
            raise UserError(problem, fix="remove one of the two")
    axes = []
    for word in grid:
        keys, _, values = word.partition("=")
        axes.append([[f"{key}={value}" for key in keys.split(",")] for value in values.split(",")])
    names = set()
    for cells in itertools.product(*axes):
        words = [word for cell in cells for word in cell]
        values = load_config(arguments.config, [*common, *words]).model_dump()
        keys_of_words = [word.partition("=")[0] for word in words]
        settings = {key: reduce(getitem, key.split("."), values) for key in keys_of_words}
        # The name has the values as they were read: 1e-6 and 0.000001 are the same run.
        firsts = [cell[0].partition("=")[0] for cell in cells]
        shown = ",".join(f"{key}={settings[key]}" for key in firsts)
        name = re.sub(r"[^\w.+,=-]", "-", shown) or "run"
        if name in names or len(name.encode()) > _MAX_NAME:
            fix = "remove one of the two values, or shorten them by links"
            raise UserError(f"the name of the run {name} is taken or too long", fix=fix)
        names.add(name)
        directory = arguments.out / name
        words = [*common, *words, f"run_dir={directory}"]
        config = load_config(arguments.config, words)
        yield Run(settings, directory, ["--config", arguments.config, *words], config)


def launch(run: Run, launcher: list[str]) -> int:
    """Do a run, append its output to a log next to its directory, and return the exit code."""
    log = run.directory.with_name(f"{run.directory.name}.log")
    with failures_named(log, UserError):
        make_directory(log.parent)
        log.touch()
    logger.info("output in %s", log)
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        process.terminate()  # the run saves its state

    if not launcher or shutil.which(launcher[0]) is None:
        problem = f"--launcher {shlex.join(launcher)!r} is not a program"
        raise UserError(problem, fix="correct its path, or remove --launcher")
    command = [*launcher, str(ROOT / "launch" / "train.py"), *run.arguments]
    with log.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        with on_stop_signals(stop), process:
            process.wait()
    if received:
        raise LezoError(f"stopped by {received[0].name}; the same command continues")
    return process.returncode


def do(runs: list[Run], launcher: list[str], *, may_diverge: bool) -> None:
    """Do the runs that are not done. LezoError: one has failed, but for divergence if it may."""
    failures = []
    for number, run in enumerate(runs):
        name = run.directory.name
        logger.info("%d of %d: %s%s", number + 1, len(runs), name, ", done" * run.is_done())
        if run.is_done():
            continue
        code = launch(run, launcher)
        if run.is_done() or (may_diverge and code == DivergenceError.exit_code):
            continue
        log = run.directory.with_name(f"{name}.log").read_text().splitlines()
        errors = [line for line in log if line.startswith("error:")]
        cause = f"{name} (exit code {code}): {' '.join(errors[-1:] or log[-_LAST_LINES:])}"
        logger.error("%s", cause)
        failures.append(cause)
        if number == 0 and code == UserError.exit_code:
            logger.error("the first run is refused, so no other is started")
            break
    if failures:
        raise LezoError(f"{len(failures)} of {len(runs)} runs failed: {'; '.join(failures)}")


def table(runs: list[Run], directory: Path) -> str:
    """Write results.csv, and return the tables of the runs that have begun.

    They are those of `lezo-ds report`, of which each names the settings with the lowest mean
    validation loss.
    """
    begun = [run.directory for run in runs if RunDirectory(run.directory).config.exists()]
    if not begun:
        return "no run has begun"
    frame = name_runs(read_runs(begun))
    frame["run"] = [Path(run).name for run in frame["directory"]]
    settings = {str(run.directory): run.settings for run in runs}
    for key in runs[0].settings:  # the value of a key may be a map
        frame[key] = [settings[directory][key] for directory in frame["directory"]]
    columns = ["run", "name", *runs[0].settings, "finished", "test", "best_dev_loss"]
    write_output(directory / "results.csv", frame[columns].to_csv(index=False))
    texts = []
    for title, scores in score_tables(frame).items():
        best = scores["loss"].idxmin() if "loss" in scores else "none"
        texts.append(f"{title}\n{as_text(scores)}\nlowest validation loss: {best}")
    return "\n\n".join(texts)


def main() -> None:
    """Do what the command line asks for."""
    arguments = read_arguments()
    runs = list(plan(arguments))
    if arguments.index is not None:
        if not 0 <= arguments.index < len(runs):
            fix = f"give 0 to {len(runs) - 1}; --list shows the runs"
            raise UserError(f"--index {arguments.index} is not the number of a run", fix=fix)
        do([runs[arguments.index]], arguments.launcher, may_diverge=arguments.tune is not None)
        return
    try:
        if arguments.list:
            for number, run in enumerate(runs):
                print(f"{number:4d}  {'done' if run.is_done() else 'open'}  {run.directory}")
        else:
            do(runs, arguments.launcher, may_diverge=arguments.tune is not None)
    finally:
        print(table(runs, arguments.out))


if __name__ == "__main__":
    end_process_after(main)
