"""A study: several methods on several tasks, each at its best learning rate, over seeds.

All methods take their rate from one grid. A method starts at the rate that the study gives it and its two
neighbors on the grid, and goes on to the next neighbor until the rate with the lowest validation loss has a
worse one on both sides. The other seeds run at that rate only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from lezo_ds.config import forward_passes_per_step
from lezo_ds.errors import UserError
from lezo_ds.files import write_atomically
from lezo_ds.tools.reports.results_table import over_seeds
from lezo_ds.tools.sweep import KEEP, SweepRun, plan_sweep, results_frame, run_sweep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method:
    """A row of the study's table.

    Attributes:
        name: as the table shows it.
        changes: `key=value` changes to the study's recipe. In the file, `like` names a method above this one,
            whose changes come first.
        rate: dotted key of the learning rate; None for a method that has none.
        start: the value of the grid at which the search starts; None without a rate.
        num_seeds: how many of the study's seeds run at the best rate.
        tasks: names of the tasks it runs on; None for all.
    """

    name: str
    changes: tuple[str, ...]
    rate: str | None
    start: float | None
    num_seeds: int
    tasks: tuple[str, ...] | None


@dataclass(frozen=True)
class Study:
    """What a study's file says.

    Attributes:
        recipe: name or YAML file of the recipe that all runs share.
        changes: `key=value` changes to it, for all runs.
        seeds: seeds of the runs; the search of the rate uses the first.
        grid: learning rates, rising.
        tasks: `key=value` changes by the name of each task.
        methods: the methods, in the order of the table.
    """

    recipe: str
    changes: tuple[str, ...]
    seeds: tuple[int, ...]
    grid: tuple[float, ...]
    tasks: Mapping[str, tuple[str, ...]]
    methods: tuple[Method, ...]


def read_study(path: Path) -> Study:
    """Read a study's YAML file (see launch/studies/smollm2.yaml).

    Raises:
        UserError: the file cannot be read, or it is not a study.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        study = Study(
            recipe=values["recipe"],
            changes=tuple(values["changes"]),
            seeds=tuple(values["seeds"]),
            grid=tuple(map(float, values["grid"])),
            tasks={name: tuple(changes) for name, changes in values["tasks"].items()},
            methods=_methods(values["methods"]),
        )
        for method in study.methods:
            if method.rate is not None and method.start not in study.grid:
                raise ValueError(f"{method.name}: start {method.start} is not in the grid")
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is not a study",
            got=f"{type(error).__name__}: {' '.join(str(error).split())}",
            expected="the keys recipe, changes, seeds, grid, tasks and methods",
            fix="compare it with launch/studies/smollm2.yaml",
        ) from error
    return study


def run_study(study: Study, directory: Path, launcher: Sequence[str]) -> str:
    """Do what is not done of a study, write DIRECTORY/study.csv after each method, and return its table.

    Args:
        study: the study.
        directory: directory of the study.
        launcher: the command that starts lezo-ds train, without its arguments.

    Raises:
        UserError: a recipe is bad, or the launcher cannot be started.
        LezoError: a run failed, or a signal came.
    """
    rows = []
    for task in study.tasks:
        for method in study.methods:
            if method.tasks is None or task in method.tasks:
                rows.append(_Cell(study, task, method, directory, launcher).run())
                write_atomically(directory / "study.csv", pd.DataFrame(rows).to_csv(index=False))
    return table(pd.DataFrame(rows))


def changes_to_recipe(study: Study, task: str, method: Method) -> list[str]:
    """Return the `key=value` changes for a method on a task, each key once: the last one counts.

    The runs keep no weights unless a change says so: a study compares results, and weights would fill disks.
    """
    changes = [f"{KEEP}=0", *study.changes, *study.tasks[task], *method.changes]
    return list({change.partition("=")[0]: change for change in changes}.values())


def table(rows: pd.DataFrame) -> str:
    """Return rows of study.csv as a text table: scores in percent, with the deviation over seeds."""
    percent = rows[["test", "test_deviation"]] * 100
    score = percent["test"].map("{:.1f}".format)
    deviation = percent["test_deviation"].map(" ± {:.1f}".format).where(rows["runs"] > 1, "")
    shown = pd.DataFrame(
        {
            "task": rows["task"],
            "method": rows["method"],
            "test (%)": score + deviation,
            "seeds": rows["runs"],
            "validation loss": rows["best_dev_loss"].map("{:.3f}".format),
            "rate": rows["rate"].map("{:g}".format).where(rows["rate"].notna(), ""),
            "rates tried": rows["rates_tried"],
            "forward passes": rows["forward_passes"],
            "minutes": (rows["seconds"] / 60).map("{:.1f}".format),
            "GiB": (rows["peak_memory_bytes"] / 2**30).map("{:.2f}".format),
        }
    )
    text: str = shown.to_string(index=False, justify="left")
    return text


def _methods(entries: Sequence[Mapping[str, Any]]) -> tuple[Method, ...]:
    found: dict[str, Method] = {}
    for entry in entries:
        if entry["name"] in found:
            raise ValueError(f"two methods have the name {entry['name']}")
        if "like" in entry and entry["like"] not in found:
            raise ValueError(f"{entry['name']}: no method above it has the name {entry['like']}")
        inherited = found[entry["like"]].changes if "like" in entry else ()
        found[entry["name"]] = _method(entry, inherited)
    return tuple(found.values())


def _method(entry: Mapping[str, Any], inherited: tuple[str, ...]) -> Method:
    rate, start, tasks = entry.get("rate"), entry.get("start"), entry.get("tasks")
    return Method(
        name=entry["name"],
        changes=(*inherited, *entry["changes"]),
        rate=rate,
        start=None if rate is None else float(entry["start"] if start is not None else "nan"),
        num_seeds=entry.get("num_seeds", 1),
        tasks=None if tasks is None else tuple(tasks),
    )


@dataclass(frozen=True)
class _Cell:
    """One method on one task."""

    study: Study
    task: str
    method: Method
    directory: Path
    launcher: Sequence[str]

    def run(self) -> dict[str, Any]:
        """Do the runs that are not done, and return the row of the table."""
        rate, tried = self._best_rate()
        runs = [self._planned(rate, seed) for seed in self.study.seeds[: self.method.num_seeds]]
        found = over_seeds(self._done(runs), []).iloc[0]
        passes = forward_passes_per_step(runs[0].config)
        return {
            "task": self.task,
            "method": self.method.name,
            "rate": rate,
            "rates_tried": tried,
            **found.to_dict(),
            "forward_passes": int(passes * (found["steps"] or 0)),
        }

    def _best_rate(self) -> tuple[float | None, int]:
        """Return the rate of the grid with the lowest validation loss, and how many were tried."""
        if self.method.rate is None:
            return None, 0
        assert self.method.start is not None
        grid = self.study.grid
        losses: dict[int, float] = {}
        best = grid.index(self.method.start)
        while True:
            near = [i for i in (best, best - 1, best + 1) if 0 <= i < len(grid) and i not in losses]
            if not near:
                return grid[best], len(losses)
            for i in near:
                (loss,) = self._done([self._planned(grid[i], self.study.seeds[0])])["best_dev_loss"]
                losses[i] = float("inf") if pd.isna(loss) else float(loss)
            best = min(losses, key=lambda i: losses[i])

    def _done(self, runs: Sequence[SweepRun]) -> pd.DataFrame:
        run_sweep(runs, self.launcher)
        return results_frame(runs)

    def _planned(self, rate: float | None, seed: int) -> SweepRun:
        grid = [f"seed={seed}"]
        if rate is not None:
            grid.insert(0, f"{self.method.rate}={rate:g}")
        (run,) = plan_sweep(
            self.study.recipe,
            grid,
            self.directory / self.task / self.method.name.replace(" ", "-"),
            overrides=changes_to_recipe(self.study, self.task, self.method),
        )
        return run
