"""Runs as one HTML page: a table of scores, curves of validation scores and losses, and answers.

The page is one file without scripts. It loads nothing, and shows what a run has written as text.
report.html is its template.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from jinja2 import Template

from lezo_ds.tasks.metrics import REWARD
from lezo_ds.tools.charts import Chart, svg
from lezo_ds.tools.curves import CURVE_KEYS, read_curves
from lezo_ds.tools.tables import (
    JUDGES,
    NOTE,
    SEEDS,
    read_judged_answers,
    score_table,
    short,
    shown_score,
)


def page(runs: pd.DataFrame) -> str:
    """Return the page of runs that `name_experiments` has named."""
    each_run = []
    answers = []
    by_label = []
    judged_answers = []
    for run in runs.to_dict("records"):
        row = {
            "directory": run["directory"],
            "test": shown_score(run, "test"),
            "state": run["problem"] or "finished",
        }
        each_run.append(row | {name: short(run[name]) for name in ("experiment", *SEEDS)})
        judged_answers.append((run["directory"], read_judged_answers(Path(run["directory"]))))
        if run["finished"]:
            shown = run["answers"]
            judge = JUDGES.get(run["metric"])
            if judge is not None:  # the wrong ones, beginning with the worst
                shown = sorted((answer for answer in shown if judge(answer) < 1), key=judge)
            answers.append((run["directory"], judge is not None, shown))
            by_label.append((run["directory"], run["labels"]))
    template = Template(Path(__file__).with_name("report.html").read_text(), autoescape=True)
    html: str = template.render(
        scores=score_table(runs).to_dict("records"),
        note=NOTE,
        sections=sections(runs),
        svg=svg,
        runs=each_run,
        answers=answers,
        by_label=by_label,
        judged_answers=judged_answers,
    )
    return html


def sections(runs: pd.DataFrame) -> Iterator[tuple[str, list[Chart]]]:
    """Yield a heading and two charts for each model, task, objective and metric.

    The charts are scores by step, and losses by minutes.
    """
    for (model, task, _, metric), group in read_curves(runs).groupby(CURVE_KEYS, sort=False):
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
