"""Runs as tables: a row for each run, and a row for each experiment with means over its seeds.

    run directories --read_runs--> a row for each run: its settings, its results, its problem
                    --name_experiments--> the column `experiment`
                    --score_table--> a row for each experiment, as texts

An experiment is a group of runs that differ in their seeds only. Runs may be unfinished or damaged,
and may come from anyone: their values are read, and nothing that they name is imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lezo_ds import files
from lezo_ds.config import RunConfig, config_from_dict, config_to_dict, flatten, load_yaml
from lezo_ds.config.paper import PAPER_SCORES, Experiment
from lezo_ds.config.schema import READER
from lezo_ds.errors import UserError
from lezo_ds.runs.results import RunResults
from lezo_ds.tasks.custom import CUSTOM
from lezo_ds.tasks.metrics import REWARD, best_f1, normalize

# What reading a damaged JSON or YAML file may raise. YamlError is a ValueError.
DAMAGE = (*files.DAMAGE, UserError)

# The settings in which the repetitions of an experiment differ.
SEEDS = ["seed", "data.seed"]
# The numbers of results.json that tables have, and the standard error of `test`.
MEASURED = [
    "test",
    "zero_shot",
    "majority_class",
    "best_dev_loss",
    "best_step",
    "steps",
    "seconds",
    "trained_dev_loss",
    "peak_memory_bytes",
    "worse_than_base",
    "standard_error",
]
_COLUMNS = [
    "directory",
    "model",
    "task",
    "method",
    "learning_rate",
    *SEEDS,
    "metric",
    *MEASURED,
    "finished",
    "problem",
]
# Runs that differ in these settings only belong to the same experiment.
_NO_DIFFERENCE = {*SEEDS, "train.micro_batch_size"}
_NO_DIFFERENCE |= READER.may_differ - {"train.steps", "data.train", "data.path"}

_METHOD_NAMES = {
    "zero_shot": "zero-shot",
    "icl": "ICL",
    "adamw": "AdamW",
    "mezo": "MeZO",
    "lezo": "LeZO",
}

NOTE = """\
Scores and errors are in percent, rewards as they are. A score is a mean over seeds
± the sample standard deviation (number of runs). The standard error is that of one
run, over its test examples."""
WORSE = "worse than before training"
BELOW_ZERO_SHOT = "below zero-shot"
BELOW_MAJORITY = "below the majority class"


class Answer(NamedTuple):
    """What a model answered to an example of the test split.

    Attributes:
        prompt: What the model read.
        predicted: The answer.
        right: The right answers.
    """

    prompt: str
    predicted: str
    right: list[str]


def _accuracy(answer: Answer) -> float:
    return float(answer.predicted in answer.right)


def _exact_match(answer: Answer) -> float:
    return float(normalize(answer.predicted) in map(normalize, answer.right))


def _f1(answer: Answer) -> float:
    return best_f1(answer.predicted, answer.right)


# By the name of a metric that is a mean over answers, how right an answer is, from 0 to 1.
JUDGES: Mapping[str, Callable[[Answer], float]] = {
    "accuracy": _accuracy,
    "exact_match": _exact_match,
    "f1": _f1,
}


def read_runs(directories: Iterable[Path]) -> pd.DataFrame:
    """Return one row for each directory, whether or not it holds a finished run.

    The columns are _COLUMNS and every key of config.yaml. The method "mezo" is LeZO that drops no
    block. The column `problem` says why a run is not finished. A value that does not exist is
    missing.
    """
    frame = pd.DataFrame([_read_run(Path(directory)) for directory in directories])
    settings = [name for name in frame if name not in _COLUMNS]
    frame = frame.reindex(columns=[*_COLUMNS, *settings])
    return frame.astype({**dict.fromkeys(MEASURED, float), "finished": bool})


def _read_run(directory: Path) -> dict[str, Any]:
    """Return the row of a run; its problem is empty if it is finished."""
    row: dict[str, Any] = {"directory": str(directory), "finished": False, "peft.kind": "none"}
    try:
        row |= _settings(recorded_config(directory))
    except DAMAGE as error:
        return {**row, "problem": f"not a run, or damaged ({' '.join(str(error).split())})"}
    path = directory / "results.json"
    if not path.exists():
        return {**row, "problem": "no results yet: it was killed, or is still going"}
    results = RunResults.read(path)
    if results is None:
        return {**row, "problem": "damaged results.json"}
    row["metric"] = results.metric
    for name, value in asdict(results).items():
        if name in MEASURED and value is not None:
            row[name] = float(value)
    if not results.finished:
        return {**row, "test": None, "problem": f"unfinished, at step {results.steps}"}
    judge = JUDGES.get(results.metric)
    if judge is not None:
        answers = read_answers(directory, results.best_step)
        scores = pd.Series([judge(answer) for answer in answers], dtype=float)
        row["standard_error"] = scores.sem()
    return {**row, "finished": True, "problem": ""}


def recorded_config(directory: Path) -> RunConfig:
    """Return the configuration of a run. One of DAMAGE: it cannot be read."""
    values = load_yaml((directory / "config.yaml").read_text(encoding="utf-8"))
    return config_from_dict(values, str(directory), recorded=True)


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a run by their dotted keys, and what identifies its experiment."""
    settings: dict[str, Any] = {}
    for key, value in flatten(config_to_dict(config)).items():
        # pandas would take a list for several values.
        settings[key] = str(value) if isinstance(value, list | tuple) else value
    settings["model"] = config.model.path
    settings["task"] = config.data.task
    source = config.data.train or config.data.path
    if config.data.task == CUSTOM and source is not None:
        settings["task"] = Path(source).stem
    settings["learning_rate"] = config.zo.learning_rate
    if config.method == "adamw":
        settings["learning_rate"] = config.adamw.learning_rate
    if config.method == "lezo" and config.zo.sparsity == 0:
        settings["method"] = "mezo"
    return settings


def read_answers(directory: Path, step: float | None) -> list[Answer]:
    """Return the answers of a run to the test split after a step, or none if they are damaged.

    A missing step stands for the base model.
    """
    if step is None or pd.isna(step):
        step = 0
    path = directory / "predictions" / f"step-{int(step):08}.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [
            Answer(
                str(row["prompt"]), str(row["predicted"]), [str(right) for right in row["right"]]
            )
            for row in rows
        ]
    except DAMAGE:
        return []


def over_seeds(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return one row for each combination of the keys' values, in the order of appearance.

    The columns are

        the keys
        runs, finished   their numbers
        MEASURED         means over the finished runs, missing if any of them lacks the value
        NAME_deviation   sample standard deviations over the finished runs
    """
    groups = frame.groupby(list(keys) or (lambda _: 0), sort=False, dropna=False).ngroup()
    done = frame[frame["finished"]].groupby(groups)[MEASURED]
    tables = [
        frame.loc[~groups.duplicated(), list(keys)].reset_index(drop=True),
        frame["finished"].groupby(groups).agg(runs="size", finished="sum"),
        done.mean(skipna=False),
        done.std(skipna=False).add_suffix("_deviation"),
    ]
    return pd.concat(tables, axis=1)


def name_experiments(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with the column `experiment`, such as "LeZO lora, learning_rate=1e-06".

    That is the method, the adapter, and the settings that differ between the runs of both on the
    same model and task.
    """
    settings = [name for name in runs if "." in name and name not in _NO_DIFFERENCE]
    experiments = pd.Series(None, runs.index, dtype=object)
    for (_, _, method, adapter), group in runs.groupby(["model", "task", "method", "peft.kind"]):
        title = _METHOD_NAMES.get(method, method)
        if adapter != "none":
            title = f"{title} {adapter}"
        varying = [key for key in settings if group[key].nunique(dropna=False) > 1]
        for index, run in group.iterrows():
            words = [title]
            for key in varying:
                if pd.notna(run[key]):
                    words.append(f"{key.rpartition('.')[2]}={_short(run[key])}")
            experiments[index] = ", ".join(words)
    return runs.assign(experiment=experiments)


def score_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the texts of a table with a row for each experiment of `name_experiments`."""
    keys = ["model", "task", "experiment", "metric", "method", "peft.kind", "learning_rate"]
    summary = over_seeds(runs[runs["finished"]], keys)
    return pd.DataFrame([_score_row(row) for row in summary.to_dict("records")])


def _score_row(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "task": row["task"],
        "method": row["experiment"],
        "metric": row["metric"],
        "test": _score(row),
        "": _verdict(row),
        "standard error": shown_score(row, "standard_error"),
        "before": shown_score(row, "zero_shot"),
        "majority": shown_score(row, "majority_class"),
        "paper": _paper_score(row),
        "learning rate": _short(row["learning_rate"]),
        "validation loss": _short(row["best_dev_loss"]),
        "steps": _short(row["steps"]),
        "minutes": _short(row["seconds"] / 60),
        "GB": _short(row["peak_memory_bytes"] / 1e9),
        "model": Path(row["model"]).name,
    }


def _score(row: Mapping[str, Any]) -> str:
    """Return the mean with the deviation and the number of runs, such as "85.0 ± 7.1 (2)"."""
    mean = shown_score(row, "test")
    if pd.notna(row["test_deviation"]):
        mean += f" ± {shown_score(row, 'test_deviation')}"
    return f"{mean} ({row['finished']})"


def _verdict(row: Mapping[str, Any]) -> str:
    """Return what is wrong with an experiment's score, or nothing."""
    if row["worse_than_base"] > 0:
        return WORSE
    if row["test"] < row["zero_shot"]:
        return BELOW_ZERO_SHOT
    if row["test"] < row["majority_class"]:
        return BELOW_MAJORITY
    return ""


def _paper_score(row: Mapping[str, Any]) -> str:
    """Return the score of LeZO's tables (Wang et al. 2024) for the same model, task and method."""
    cell = Experiment(
        model=Path(row["model"]).name.lower(),
        task=row["task"].lower(),
        method=row["method"],
        peft=row["peft.kind"],
    )
    return f"{PAPER_SCORES[cell]:.1f}" if cell in PAPER_SCORES else "-"


def shown_score(row: Mapping[str, Any], name: str) -> str:
    """Return a score of a row in percent, but a reward as it is, and a missing one as "-"."""
    score = row[name]
    if pd.isna(score):
        return "-"
    return f"{score:.3f}" if row["metric"] == REWARD else f"{100 * score:.1f}"


def _short(value: Any) -> str:
    if pd.isna(value):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
