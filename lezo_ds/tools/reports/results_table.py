"""Runs as a table with one row for each run directory, and their means over seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from lezo_ds.config import (
    RESUME_MAY_DIFFER,
    config_from_dict,
    config_to_dict,
    flatten,
    forward_passes_per_step,
    load_yaml,
)
from lezo_ds.errors import UserError
from lezo_ds.registry import names_code
from lezo_ds.tasks.custom import CUSTOM

SEEDS = ["seed", "data.seed"]
"""Columns in which repetitions of one experiment differ."""

RATES = ["zo.learning_rate", "adamw.learning_rate"]
"""Columns of learning rates, which are searched for each experiment."""

MEASURED = [
    *("test", "zero_shot", "majority_class", "best_dev_loss"),
    *("best_step", "steps", "seconds", "peak_memory_bytes"),
]
"""Columns of results.json that `over_seeds` averages."""

_COLUMNS = [
    *("directory", "model", "task", "method", "peft", "sparsity", "learning_rate"),
    *(*SEEDS, "passes_per_step", "metric", *MEASURED, "world_size", "finished", "problem"),
]

_NOT_SETTINGS = RESUME_MAY_DIFFER - {"train.steps"} | {"train.micro_batch_size"} | {*SEEDS}
"""Config keys that do not make another experiment: seeds, paths, and what changes only the last bits."""

DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, yaml.YAMLError)
"""What reading of a damaged file of a run raises."""


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
    - passes_per_step: forward passes of the batch in a step (see `forward_passes_per_step`);
    - from results.json: metric (name of the score); test, zero_shot and majority_class, from 0 to 1;
      best_dev_loss, best_step, steps, seconds, peak_memory_bytes, world_size;
    - finished: whether the run has ended and has a test score;
    - problem: why the run is not finished, in one line; "" if it is.

    A value that does not exist is missing (NaN). No damaged file raises an error: `problem` describes it.
    """
    frame = pd.DataFrame([_read_run(Path(directory)) for directory in directories])
    frame = frame.reindex(columns=[*_COLUMNS, *(name for name in frame if name not in _COLUMNS)])
    numbers = [*MEASURED, "sparsity", "learning_rate", "passes_per_step"]
    frame = frame.astype(dict.fromkeys(numbers, float) | {"finished": bool})
    return frame.assign(zero_shot=_fill_zero_shot(frame))


def settings_columns(frame: pd.DataFrame) -> list[str]:
    """Return the config columns that tell experiments apart; runs that agree in them differ in seeds only."""
    return [name for name in frame.columns if "." in name and name not in _NOT_SETTINGS]


def varying_columns(frame: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """Return those of the columns that do not have the same value in all rows; missing counts as a value."""
    return [name for name in columns if frame[name].nunique(dropna=False) > 1]


def over_seeds(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return one row for each combination of the keys' values, in the order of appearance.

    Args:
        frame: of `read_runs`.
        keys: columns that runs of one group have in common; without any, all runs are one group.

    Returns:
        The keys; runs (number of rows); finished (how many of them); and, over the finished runs, each of
        `MEASURED` as a mean and NAME_deviation as the sample standard deviation. A mean is missing if a
        finished run lacks the value, and a deviation is missing for fewer than two finished runs.
    """
    groups = pd.Series(0, frame.index)
    if keys and len(frame):
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
    """Return the index label of the row of `over_seeds` with the lowest mean validation loss.

    Rows with unfinished runs do not take part. None if no other row has a validation loss.
    """
    losses = summary.loc[summary["finished"] == summary["runs"], "best_dev_loss"].dropna()
    return None if losses.empty else int(losses.idxmin())


def _read_run(directory: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"directory": str(directory), "finished": False}
    config, results = directory / "config.yaml", directory / "results.json"
    if not config.is_file():
        return row | {"problem": "not a run directory (it has no config.yaml)"}
    try:
        values = load_yaml(config.read_text(encoding="utf-8"))
        row |= _config_columns(values, str(config))
        if not results.is_file():
            return row | {"problem": "no results yet (the run was killed, or is still going)"}
        return row | _result_columns(json.loads(results.read_text(encoding="utf-8")))
    except DAMAGE as error:
        file = results.name if "method" in row else config.name
        return row | {"problem": f"damaged {file} ({type(error).__name__}: {' '.join(str(error).split())})"}


def _config_columns(values: dict[str, Any], where: str) -> dict[str, Any]:
    passes: int | None = None
    try:
        recorded = config_from_dict(values, where, recorded=True)
        values, passes = config_to_dict(recorded), forward_passes_per_step(recorded)
    except UserError:
        pass  # a later version made the run: show what it recorded
    config = {key: str(value) if isinstance(value, list) else value for key, value in flatten(values).items()}
    method, sparsity, rate = config["method"], None, None
    if method == "lezo":
        sparsity, rate = config.get("zo.sparsity"), config["zo.learning_rate"]
        method = method if sparsity else "mezo"
    elif method == "adamw":
        rate = config["adamw.learning_rate"]
    return {
        **config,
        "model": config["model.path"],
        "task": _task_name(config),
        "method": method,
        "peft": config.get("peft.kind", "none"),
        "sparsity": None if sparsity is None else float(sparsity),
        "learning_rate": None if rate is None else float(rate),
        "passes_per_step": passes,
    }


def _task_name(config: Mapping[str, Any]) -> str:
    """Return the name of the task, or of the data, which may be other sentences in a benchmark's schema."""
    task: str = config["data.task"].lower()
    source = config.get("data.train") or config.get("data.path")
    if not source or names_code(task):
        return task
    name = Path(source).stem
    is_benchmark = task != CUSTOM and task in re.sub(r"[^a-z0-9]", "", name.lower())
    return task if is_benchmark else name


def _fill_zero_shot(frame: pd.DataFrame) -> pd.Series:
    """Return the zero-shot scores; where a run has none, that of a zero-shot run on the same data."""
    runs = frame[(frame["method"] == "zero_shot") & frame["finished"]]
    scores = runs.groupby(["model", "task"])["test"].mean()
    known = pd.MultiIndex.from_frame(frame[["model", "task"]]).map(scores.to_dict())
    return frame["zero_shot"].fillna(pd.Series(known, frame.index, dtype=float))


def _result_columns(results: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: results.get(name) for name in MEASURED}
    found = {name: None if value is None else float(value) for name, value in numbers.items()}
    found |= {name: results.get(name) for name in ("metric", "world_size")}
    if not results["finished"]:
        return found | {"test": None, "problem": f"unfinished, at step {results['steps']}"}
    return found | {"test": float(results["test"]), "finished": True, "problem": ""}
