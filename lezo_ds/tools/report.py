"""Runs as a table with a row for each experiment, averaged over seeds, and as one HTML page with curves."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from glob import glob
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from lezo_ds import files
from lezo_ds.config import RunConfig, config_from_dict, config_to_dict, flatten, load_yaml
from lezo_ds.config.paper import PAPER_SCORES, Experiment
from lezo_ds.config.schema import READER
from lezo_ds.errors import UserError
from lezo_ds.files import failures_named, write_atomically
from lezo_ds.runs.results import RunResults
from lezo_ds.tasks.custom import CUSTOM
from lezo_ds.tasks.metrics import REWARD, best_f1, normalize

SEEDS = ["seed", "data.seed"]  # in which the repetitions of one experiment differ
MEASURED = ["test", "zero_shot", "majority_class", "best_dev_loss", "best_step", "steps", "seconds"]
MEASURED += ["trained_dev_loss", "peak_memory_bytes", "worse_than_base", "standard_error"]
_COLUMNS = ["directory", "model", "task", "method", "learning_rate", *SEEDS, "metric", *MEASURED]
_COLUMNS += ["finished", "problem"]
_NOT_SETTINGS = READER.may_differ - {"train.steps", "data.train", "data.path"}
_NOT_SETTINGS |= {"train.micro_batch_size", *SEEDS}
_CURVE_KEYS = ["model", "task", "train.objective", "metric"]
_SHOWN_ANSWERS, _SHOWN_CHARACTERS = 10, 300
_JUDGES: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "accuracy": lambda answer, right: answer in right,
    "exact_match": lambda answer, right: normalize(answer) in map(normalize, right),
    "f1": best_f1,
}
"""By its metric, how right an answer is, 0 to 1. The score is the mean."""

_METHODS = {
    "zero_shot": "zero-shot",
    "icl": "ICL",
    "adamw": "AdamW",
    "mezo": "MeZO",
    "lezo": "LeZO",
}

DAMAGE = (*files.DAMAGE, UserError)  # of JSON and YAML files: YamlError is a ValueError

_NOTE = """Scores and errors are in percent, rewards as they are. A score is a mean over seeds ± the sample
standard deviation (number of runs). The standard error is that of one run, over its test examples."""
_WORSE, _BELOW, _BELOW_MAJORITY = (
    "worse than before training",
    "below zero-shot",
    "below the majority class",
)

logger = logging.getLogger(__name__)


def main(arguments: Namespace) -> None:
    runs = read_runs(find_runs(arguments.runs))
    for run in runs[~runs["finished"]].itertuples():
        logger.warning("warning: %s: %s", run.directory, run.problem)
    if runs["method"].isna().all():
        raise UserError(
            "none of these directories holds a run", fix="give the run_dir of runs, or a pattern"
        )
    runs = name_experiments(runs)
    if arguments.html is not None:
        with failures_named(arguments.html):
            write_atomically(arguments.html, page(runs))
    elif runs["finished"].any():
        print(score_table(runs).to_string(index=False), _NOTE, sep="\n\n")
    else:
        raise UserError(
            "none of these runs is finished", fix="start them again (they resume), or use --html"
        )


def find_runs(patterns: Iterable[str]) -> list[Path]:
    """Return the directories that names and glob patterns stand for, each once, in this order."""
    found: dict[Path, Path] = {}
    for pattern in patterns:
        names = [pattern] if Path(pattern).is_dir() else sorted(glob(pattern))  # noqa: PTH207
        if not (paths := [path for path in map(Path, names) if path.is_dir()]):
            raise UserError(
                f"there is no run {pattern}", fix="give the run_dir of runs, or a pattern"
            )
        for path in paths:
            found.setdefault(path.resolve(), path)
    return list(found.values())


def read_runs(directories: Iterable[Path]) -> pd.DataFrame:
    """Return one row for each directory, whether or not it holds a finished run.

    The columns are _COLUMNS and every key of config.yaml. The method "mezo" is LeZO that drops no block, and
    problem says why a run is not finished. A value that does not exist is missing.
    """
    frame = pd.DataFrame([_read_run(Path(directory)) for directory in directories])
    frame = frame.reindex(columns=[*_COLUMNS, *(name for name in frame if name not in _COLUMNS)])
    return frame.astype(dict.fromkeys(MEASURED, float) | {"finished": bool})


def over_seeds(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return one row for each combination of the keys' values, in the order of appearance.

    The columns are the keys; runs and finished, their numbers; and over the finished runs each of MEASURED as
    a mean, missing if any lacks the value, and NAME_deviation as the sample standard deviation.
    """
    groups = frame.groupby(list(keys) or (lambda _: 0), sort=False, dropna=False).ngroup()
    done = frame[frame["finished"]].groupby(groups)[MEASURED]
    parts = [
        frame.loc[~groups.duplicated(), list(keys)].reset_index(drop=True),
        frame["finished"].groupby(groups).agg(runs="size", finished="sum"),
        done.mean(skipna=False),
        done.std(skipna=False).add_suffix("_deviation"),
    ]
    return pd.concat(parts, axis=1)


def name_experiments(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with the column experiment: the method, and the settings that differ between its runs."""
    settings = [name for name in runs if "." in name and name not in _NOT_SETTINGS]
    experiments = pd.Series(None, runs.index, dtype=object)
    for (_, _, method, adapter), group in runs.groupby(["model", "task", "method", "peft.kind"]):
        title = _METHODS.get(method, method) + ("" if adapter == "none" else f" {adapter}")
        varying = [name for name in settings if group[name].nunique(dropna=False) > 1]
        for index, run in group.iterrows():
            values = [
                f"{key.rpartition('.')[2]}={_short(run[key])}"
                for key in varying
                if pd.notna(run[key])
            ]
            experiments[index] = ", ".join([title, *values])
    return runs.assign(experiment=experiments)


def score_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the texts of a table with a row for each experiment of `name_experiments`."""
    keys = ["model", "task", "experiment", "metric", "method", "peft.kind", "learning_rate"]
    summary = over_seeds(runs[runs["finished"]], keys)
    rows = [
        {
            "task": row["task"],
            "method": row["experiment"],
            "metric": row["metric"],
            "test": _score(row),
            "": _verdict(row),
            "standard error": _unit(row, "standard_error"),
            "before": _unit(row, "zero_shot"),
            "majority": _unit(row, "majority_class"),
            "paper": _paper_score(row),
            "learning rate": _short(row["learning_rate"]),
            "validation loss": _short(row["best_dev_loss"]),
            "steps": _short(row["steps"]),
            "minutes": _short(row["seconds"] / 60),
            "GB": _short(row["peak_memory_bytes"] / 1e9),
            "model": Path(row["model"]).name,
        }
        for row in summary.to_dict("records")
    ]
    return pd.DataFrame(rows)


def page(runs: pd.DataFrame) -> str:
    """Return one self-contained page: the table, the curves of each task and metric, and the runs."""
    shown = runs[["directory", "experiment", *SEEDS]].assign(
        test=[_unit(run, "test") for run in runs.to_dict("records")],
        state=runs["problem"].where(~runs["finished"], "finished"),
    )
    table = score_table(runs).to_html(index=False, border=0) if runs["finished"].any() else ""
    for verdict in (_WORSE, _BELOW, _BELOW_MAJORITY):
        table = table.replace(f"<td>{verdict}</td>", f"<td><mark>{verdict}</mark></td>")
    return Template(Path(__file__).with_name("report.html").read_text()).substitute(
        table=table,
        note=_NOTE,
        charts=json.dumps(list(_charts(runs))).replace("<", "\\u003c"),
        runs=shown.to_html(index=False, border=0, na_rep="-"),
        answers="\n".join(map(_answers, runs[runs["finished"]].to_dict("records"))),
    )


def _charts(runs: pd.DataFrame) -> Iterable[dict[str, Any]]:
    """Yield, for each model, task, metric and objective, what report.html draws."""
    for (model, task, _, metric), group in read_curves(runs).groupby(_CURVE_KEYS, sort=False):
        percent = 1 if metric == REWARD else 100
        same = runs[(runs["model"] == model) & (runs["task"] == task) & (runs["metric"] == metric)]
        zero_shot, majority = percent * same[["zero_shot", "majority_class"]].mean()
        group = group.assign(score=percent * group["score"])
        before = group[group["step"] == 0][["score", "loss"]].mean()
        levels = {
            "step 0": before["score"],
            "zero-shot, test split": zero_shot,
            "majority class": majority,
        }
        title = f"Validation {metric}{'' if percent == 1 else ', percent'}"
        scores = {"title": title, "x": "step", "curves": _lines(group, "step", "score")}
        losses = {
            "title": "Validation loss",
            "x": "minutes",
            "curves": _lines(group, "minutes", "loss"),
        }
        scores["levels"] = pd.Series(levels).dropna().to_dict()
        losses["levels"] = pd.Series({"step 0": before["loss"]}).dropna().to_dict()
        yield {"heading": f"{task}, {Path(model).name}", "figures": [scores, losses]}


def _lines(group: pd.DataFrame, x: str, y: str) -> dict[str, list[list[float]]]:
    parts = group.dropna(subset=y).groupby("experiment", sort=False)
    return {name: part[[x, y]].to_numpy(float).tolist() for name, part in parts}


def read_curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Return validation scores and losses of each experiment by step, as means over its runs."""
    parts = [pd.DataFrame(columns=[*_CURVE_KEYS, "experiment", "step", "minutes", "loss", "score"])]
    for run in runs[runs["method"].notna()].to_dict("records"):
        try:
            lines = (
                (Path(run["directory"]) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            )
            rows = [
                json.loads(line) for line in lines if line.endswith("}")
            ]  # a crash may cut the last one
            part = pd.DataFrame([row for row in rows if row.get("dev_loss") is not None])
            if part.empty:  # such as of a run that does not train
                continue
            scored = [name for name in part if name.startswith("dev_") and name != "dev_loss"]
            part = part.rename(columns={"dev_loss": "loss", **dict.fromkeys(scored, "score")})
            part = part[["step", "seconds", "loss", "score"]].astype(float)
            part = part.assign(minutes=part["seconds"] / 60, metric=scored[0].removeprefix("dev_"))
        except DAMAGE as error:
            logger.warning("warning: no curve of %s: %s", run["directory"], error)
            continue
        parts.append(part.assign(**{name: run[name] for name in (*_CURVE_KEYS[:3], "experiment")}))
    keys = [*_CURVE_KEYS, "experiment", "step"]
    return (
        pd.concat(parts)
        .groupby(keys, sort=False)[["minutes", "loss", "score"]]
        .mean()
        .reset_index()
    )


def _answers(run: Mapping[str, Any]) -> str:
    """Return ten answers of a run at its best step, the worst ones if the metric tells them."""
    answers, judge = (
        _read_answers(Path(run["directory"]), run["best_step"]),
        _JUDGES.get(run["metric"]),
    )
    title = f"answers of {run['directory']}"
    if judge is not None:
        answers = sorted(
            (row for row in answers if judge(*row[1:]) < 1), key=lambda row: judge(*row[1:])
        )
        title = f"of {len(answers)} wrong {title}"
    rows = [
        (prompt[-_SHOWN_CHARACTERS:], answer, " | ".join(right))
        for prompt, answer, right in answers
    ]
    table = pd.DataFrame(rows[:_SHOWN_ANSWERS], columns=["prompt", "answer", "right"])
    text = f"{len(table)} {escape(title)}</summary>{table.to_html(index=False, border=0)}"
    return f"<details><summary>{text}</details>" if rows else ""


def _read_answers(directory: Path, step: float | None) -> list[tuple[str, str, list[str]]]:
    """Return the prompts of the test split, the answers after a step, and the right answers."""
    name = f"step-{0 if step is None or pd.isna(step) else int(step):08}.jsonl"
    try:
        rows = map(
            json.loads, (directory / "predictions" / name).read_text(encoding="utf-8").splitlines()
        )
        return [
            (str(row["prompt"]), str(row["predicted"]), [*map(str, row["right"])]) for row in rows
        ]
    except DAMAGE:
        return []


def recorded_config(directory: Path) -> RunConfig:
    values = load_yaml((directory / "config.yaml").read_text(encoding="utf-8"))
    return config_from_dict(values, str(directory), recorded=True)


def _read_run(directory: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"directory": str(directory), "finished": False, "peft.kind": "none"}
    try:
        for key, value in flatten(config_to_dict(recorded_config(directory))).items():
            row[key] = str(value) if isinstance(value, list | tuple) else value
        is_mezo = row["method"] == "lezo" and row["zo.sparsity"] == 0
        source = row["data.train"] or row["data.path"] if row["data.task"] == CUSTOM else None
        rates = "adamw" if row["method"] == "adamw" else "zo"
        row |= {"model": row["model.path"], "learning_rate": row[f"{rates}.learning_rate"]}
        row["method"] = "mezo" if is_mezo else row["method"]
        row["task"] = Path(source).stem if source else row["data.task"]
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
    judge = _JUDGES.get(results.metric)
    if judge is not None:
        answers = _read_answers(directory, results.best_step)
        scores = pd.Series([judge(*answer[1:]) for answer in answers], dtype=float)
        row["standard_error"] = scores.sem()
    return {**row, "finished": True, "problem": ""}


def _score(row: Mapping[str, Any]) -> str:
    spread = "" if pd.isna(row["test_deviation"]) else f" ± {_unit(row, 'test_deviation')}"
    return f"{_unit(row, 'test')}{spread} ({row['finished']})"


def _verdict(row: Mapping[str, Any]) -> str:
    if row["worse_than_base"] > 0:
        return _WORSE
    if row["test"] < row["zero_shot"]:
        return _BELOW
    return _BELOW_MAJORITY if row["test"] < row["majority_class"] else ""


def _paper_score(row: Mapping[str, Any]) -> str:
    """Return the score of LeZO's tables (Wang et al. 2024) for the same model, task and method."""
    cell = Experiment(
        Path(row["model"]).name.lower(), row["task"].lower(), row["method"], row["peft.kind"]
    )
    return f"{PAPER_SCORES[cell]:.1f}" if cell in PAPER_SCORES else "-"


def _unit(row: Mapping[str, Any], name: str) -> str:
    """Return a score in percent, but a reward as it is."""
    if pd.isna(row[name]):
        return "-"
    return f"{row[name]:.3f}" if row["metric"] == REWARD else f"{100 * row[name]:.1f}"


def _short(value: Any) -> str:
    if pd.isna(value):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
