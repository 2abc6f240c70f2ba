"""Runs as one HTML page: a table of scores, curves of validation scores and losses, and answers.

The page is one file without scripts. It loads nothing, and shows what a run has written as text.
report.html is its template.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from jinja2 import Template

from lezo_ds.files import read_regular
from lezo_ds.runs.directory import RunDirectory
from lezo_ds.tasks.metrics import REWARD
from lezo_ds.tools.charts import Chart, svg
from lezo_ds.tools.tables import (
    DAMAGE,
    JUDGES,
    NOTE,
    SEEDS,
    read_judged_answers,
    score_table,
    short,
    shown_score,
)

# Runs with the same values of these are drawn together.
_CHART_KEYS = ["model", "task", "train.objective", "metric"]

logger = logging.getLogger(__name__)


def page(runs: pd.DataFrame) -> str:
    """Return the page of runs that `name_experiments` has named."""
    each_run = runs.to_dict("records")
    for run in each_run:
        row = {
            "directory": run["directory"],
            "test": shown_score(run, "test"),
            "state": run["problem"] or "finished",
        }
        run["row"] = row | {name: short(run[name]) for name in ("experiment", *SEEDS)}
        run["judged_answers"] = read_judged_answers(Path(run["directory"]))
        judge = JUDGES.get(run["metric"])
        run["are_wrong"] = judge is not None
        if judge is not None:  # the wrong ones, beginning with the worst
            wrong = (answer for answer in run["answers"] if judge(answer) < 1)
            run["answers"] = sorted(wrong, key=judge)
    template = Template(Path(__file__).with_name("report.html").read_text(), autoescape=True)
    html: str = template.render(
        scores=score_table(runs).to_dict("records"),
        note=NOTE,
        sections=sections(runs),
        svg=svg,
        runs=each_run,
    )
    return html


def sections(runs: pd.DataFrame) -> Iterator[tuple[str, list[Chart]]]:
    """Yield a heading and two charts for each model, task, objective and metric.

    The charts are scores by step, and losses by minutes.
    """
    for (model, task, _, metric), group in read_curves(runs).groupby(_CHART_KEYS, sort=False):
        factor = 100
        title = f"Validation {metric}, percent"
        if metric == REWARD:  # which has no limits, so a percentage says nothing
            factor = 1
            title = "Validation reward"
        of_step_0 = group[group["step"] == 0][["loss", "score"]].mean()
        same = runs[(runs["model"] == model) & (runs["task"] == task) & (runs["metric"] == metric)]
        levels = {
            "step 0": factor * of_step_0["score"],
            "zero-shot, test split": factor * same["zero_shot"].mean(),
            "majority class": factor * same["majority_class"].mean(),
        }
        scores = Chart(
            title=title,
            x_label="step",
            curves=_points(group.assign(score=factor * group["score"]), "step", "score"),
            levels=pd.Series(levels).dropna().to_dict(),
        )
        losses = Chart(
            title="Validation loss",
            x_label="minutes",
            curves=_points(group, "minutes", "loss"),
            levels=pd.Series({"step 0": of_step_0["loss"]}).dropna().to_dict(),
        )
        yield f"{task}, {Path(model).name}", [scores, losses]


def _points(curves: pd.DataFrame, x: str, y: str) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each experiment, without those whose `y` is missing."""
    points = {}
    for name, curve in curves.dropna(subset=y).groupby("experiment", sort=False):
        points[name] = list(zip(curve[x].tolist(), curve[y].tolist(), strict=True))
    return points


def read_curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Return validation scores and losses of each experiment by step, as means over its runs.

    The columns are _CHART_KEYS, experiment, step, minutes, loss and score. A run whose metrics are
    damaged has no curve, and a warning says so.
    """
    keys = [*_CHART_KEYS, "experiment", "step"]
    curves = [pd.DataFrame(columns=[*keys, "minutes", "loss", "score"])]
    for run in runs[runs["method"].notna()].to_dict("records"):
        shared = {name: run[name] for name in ("model", "task", "train.objective", "experiment")}
        try:
            curves.append(_read_curve(Path(run["directory"])).assign(**shared))
        except DAMAGE as error:
            logger.warning("warning: no curve of %s: %s", run["directory"], error)
    groups = pd.concat(curves).groupby(keys, sort=False)
    return groups[["minutes", "loss", "score"]].mean().reset_index()


def _read_curve(directory: Path) -> pd.DataFrame:
    """Return a row for each evaluation of a run; no row if it does not train.

    Raises one of DAMAGE if metrics.jsonl is damaged.
    """
    rows = []
    for line in read_regular(RunDirectory(directory).metrics).decode().splitlines():
        if not line.endswith("}"):  # a crash may have cut the last line
            continue
        numbers = json.loads(line)
        if numbers.get("dev_loss") is None:
            continue
        score, *_ = (name for name in numbers if name.startswith("dev_") and name != "dev_loss")
        row = {
            "metric": score.removeprefix("dev_"),
            "step": float(numbers["step"]),
            "minutes": float(numbers["seconds"]) / 60,
            "loss": float(numbers["dev_loss"]),
            "score": float(numbers[score]),
        }
        rows.append(row)
    return pd.DataFrame(rows)
