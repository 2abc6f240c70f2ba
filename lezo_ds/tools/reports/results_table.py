"""Runs as a table with one row for each run directory, and their means over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from lezo_ds.config import RESUME_MAY_DIFFER, flatten
from lezo_ds.errors import UserError

SEEDS = ["seed", "data.seed"]
"""Columns in which repetitions of one experiment differ."""

SCORES = ["test", "zero_shot", "majority_class"]
"""Columns that hold scores from 0 to 1."""

MEASURED = [*SCORES, "best_dev_loss", "best_step", "steps", "seconds", "peak_memory_bytes"]
"""Columns of results.json that `over_seeds` averages."""

_COLUMNS = [
    *("directory", "model", "task", "method", "peft", "sparsity", "learning_rate", *SEEDS),
    *("metric", *MEASURED, "world_size", "finished", "problem"),
]

_NOT_SETTINGS = (RESUME_MAY_DIFFER - {"train.steps"}).union(
    SEEDS, ("train.micro_batch_size", "train.cpu_threads")
)
"""Config keys that do not make another experiment: seeds, paths, and what changes only the last bits."""


def find_runs(patterns: Iterable[str]) -> list[Path]:
    """Return the paths that names and glob patterns stand for, each once, in the given order.

    A pattern matches directories only, because logs and tables lie next to the runs of a sweep.

    Raises:
        UserError: nothing has this name or matches this pattern.
    """
    found: dict[Path, Path] = {}
    for pattern in patterns:
        path = Path(pattern)
        matches = [path]
        if not path.exists():
            relative = str(path.relative_to(path.anchor))
            matches = sorted(match for match in Path(path.anchor).glob(relative) if match.is_dir())
        if not matches:
            raise UserError(
                "there is no such run",
                got=pattern,
                expected="directories of runs, or a pattern such as runs/*",
                fix="correct the name; a run's directory is its run_dir",
            )
        for match in matches:
            found.setdefault(match.resolve(), match)
    return list(found.values())


def read_runs(directories: Iterable[Path]) -> pd.DataFrame:
    """Return one row for each directory, in the given order, whether or not it holds a finished run.

    The columns are:

    - directory (as given), model (model.path), task (in lower case), peft;
    - method: LeZO that drops no block is "mezo";
    - sparsity: share of dropped blocks from 0 to 1, for lezo and mezo; learning_rate: of the method;
    - every key of config.yaml under its dotted name, such as "zo.perturbation_scale" (`method` as above);
    - from results.json: metric (name of the test score); test, zero_shot and majority_class, from 0 to 1;
      best_dev_loss, best_step, steps, seconds, peak_memory_bytes, world_size; "versions.NAME" of libraries;
    - finished: whether the run has ended as configured and has a test score;
    - problem: why the run is not finished, in one line; "" if it is.

    A value that does not exist is missing (NaN). No damaged file raises an error: `problem` describes it.
    """
    frame = pd.DataFrame([_read_run(Path(directory)) for directory in directories])
    frame = frame.reindex(columns=[*_COLUMNS, *(name for name in frame if name not in _COLUMNS)])
    numbers = [*MEASURED, "sparsity", "learning_rate"]
    return frame.astype(dict.fromkeys(numbers, float) | {"finished": bool})


def settings_columns(frame: pd.DataFrame) -> list[str]:
    """Return the config columns that tell experiments apart; runs that agree in them differ in seeds only."""
    return [
        name
        for name in frame.columns
        if "." in name and not name.startswith("versions.") and name not in _NOT_SETTINGS
    ]


def varying_columns(frame: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    """Return those of the columns that do not have the same value in all rows; missing counts as a value."""
    return [name for name in columns if frame[name].nunique(dropna=False) > 1]


def over_seeds(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return one row for each combination of the keys' values, in the order of appearance.

    Args:
        frame: of `read_runs`; at least one row.
        keys: columns that runs of one group have in common; without any, all runs are one group.

    Returns:
        The keys; runs (number of rows); finished (how many of them); and, over the finished runs, each of
        `MEASURED` as a mean and NAME_deviation as the sample standard deviation. A mean is missing if a
        finished run lacks the value, and a deviation is missing for fewer than two finished runs.
    """
    groups = pd.Series(0, frame.index)
    if keys:
        groups = frame.groupby(list(keys), sort=False, dropna=False).ngroup()
    done = frame[frame["finished"]].groupby(groups)[MEASURED]
    parts = [
        frame.loc[~groups.duplicated(), list(keys)].reset_index(drop=True),
        frame["finished"].groupby(groups).agg(runs="size", finished="sum"),
        done.mean(skipna=False),
        done.std(skipna=False).add_suffix("_deviation"),
    ]
    return pd.concat(parts, axis=1)


def best_setting(summary: pd.DataFrame) -> int | None:
    """Return the index label of the row with the lowest mean validation loss.

    Args:
        summary: of `over_seeds`, or some of its rows. Rows with unfinished runs do not take part.

    Returns:
        None if no row has a validation loss and only finished runs.
    """
    losses = summary.loc[summary["finished"] == summary["runs"], "best_dev_loss"].dropna()
    return None if losses.empty else int(losses.idxmin())


def _read_run(directory: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"directory": str(directory), "finished": False}
    if not (directory / "config.yaml").is_file():
        return row | {"problem": "not a run directory (it has no config.yaml)"}
    try:
        values = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
        row |= _config_columns(flatten(values))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        return row | {"problem": _damaged("config.yaml", error)}
    if not (directory / "results.json").is_file():
        return row | {"problem": "no results yet (the run was killed, or is still going)"}
    try:
        return row | _result_columns(json.loads((directory / "results.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return row | {"problem": _damaged("results.json", error)}


def _config_columns(config: Mapping[str, Any]) -> dict[str, Any]:
    method, sparsity, rate = config["method"], None, None
    if method in ("lezo", "mezo"):
        sparsity, rate = config["zo.sparsity"], config["zo.learning_rate"]
        method = method if sparsity or config["zo.num_dropped_layers"] else "mezo"
    elif method == "adamw":
        rate = config["adamw.learning_rate"]
    return {
        **config,
        "model": config["model.path"],
        "task": config["data.task"].lower(),
        "method": method,
        "peft": config["peft.kind"],
        "sparsity": None if sparsity is None else float(sparsity),
        "learning_rate": None if rate is None else float(rate),
    }


def _result_columns(results: Mapping[str, Any]) -> dict[str, Any]:
    finished = results["finished"]
    numbers = {name: results.get(name) for name in MEASURED}
    versions = {f"versions.{name}": version for name, version in results.get("versions", {}).items()}
    return {
        "metric": results.get("metric"),
        **{name: None if value is None else float(value) for name, value in numbers.items()},
        "test": float(results["test"]) if finished else None,
        "world_size": results.get("world_size"),
        **versions,
        "finished": bool(finished),
        "problem": "" if finished else f"unfinished, at step {results['steps']}",
    }


def _damaged(name: str, error: Exception) -> str:
    return f"its {name} is damaged ({type(error).__name__}: {' '.join(str(error).split())})"
