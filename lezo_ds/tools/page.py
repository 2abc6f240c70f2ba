"""Runs as one HTML page: a table of scores, curves of validation scores and losses, and answers.

The page is one file without scripts. It loads nothing, and shows what a run has written as text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from lezo_ds.tasks.metrics import REWARD
from lezo_ds.tools.charts import Chart, svg
from lezo_ds.tools.tables import (
    BELOW_MAJORITY,
    BELOW_ZERO_SHOT,
    DAMAGE,
    JUDGES,
    NOTE,
    SEEDS,
    WORSE,
    read_answers,
    score_table,
    shown_score,
)

# Runs with the same values of these are drawn together.
_CHART_KEYS = ["model", "task", "train.objective", "metric"]
_SHOWN_ANSWERS = 10  # of each run
_SHOWN_CHARACTERS = 300  # of a prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Section:
    """The charts of one model, task, objective and metric."""

    heading: str
    charts: tuple[Chart, ...]


def page(runs: pd.DataFrame) -> str:
    """Return the page of runs that `name_experiments` has named."""
    finished = runs[runs["finished"]]
    table = ""
    if not finished.empty:
        table = score_table(runs).to_html(index=False, border=0)
    for verdict in (WORSE, BELOW_ZERO_SHOT, BELOW_MAJORITY):
        table = table.replace(f"<td>{verdict}</td>", f"<td><mark>{verdict}</mark></td>")
    each_run = runs[["directory", "experiment", *SEEDS]].assign(
        test=[shown_score(run, "test") for run in runs.to_dict("records")],
        state=runs["problem"].where(~runs["finished"], "finished"),
    )
    return Template(Path(__file__).with_name("report.html").read_text()).substitute(
        table=table,
        note=NOTE,
        charts="\n".join(map(_section_html, sections(runs))),
        runs=each_run.to_html(index=False, border=0, na_rep="-"),
        answers="\n".join(map(_answers_html, finished.to_dict("records"))),
    )


def sections(runs: pd.DataFrame) -> Iterator[Section]:
    """Yield the charts of runs: scores by step, and losses by minutes."""
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
        yield Section(heading=f"{task}, {Path(model).name}", charts=(scores, losses))


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
        try:
            curve = _read_curve(Path(run["directory"]))
        except DAMAGE as error:
            logger.warning("warning: no curve of %s: %s", run["directory"], error)
            continue
        if not curve.empty:
            shared = {
                name: run[name] for name in ("model", "task", "train.objective", "experiment")
            }
            curves.append(curve.assign(**shared))
    groups = pd.concat(curves).groupby(keys, sort=False)
    return groups[["minutes", "loss", "score"]].mean().reset_index()


def _read_curve(directory: Path) -> pd.DataFrame:
    """Return a row for each evaluation of a run; no row if it does not train.

    Raises one of DAMAGE if metrics.jsonl is damaged.
    """
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # A crash may have cut the last line.
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    evaluations = pd.DataFrame([row for row in rows if row.get("dev_loss") is not None])
    if evaluations.empty:
        return evaluations
    scores = [name for name in evaluations if name.startswith("dev_") and name != "dev_loss"]
    score = scores[0]
    numbers = evaluations[["step", "seconds", "dev_loss", score]].astype(float)
    return pd.DataFrame(
        {
            "metric": score.removeprefix("dev_"),
            "step": numbers["step"],
            "minutes": numbers["seconds"] / 60,
            "loss": numbers["dev_loss"],
            "score": numbers[score],
        }
    )


def _section_html(section: Section) -> str:
    figures = "\n".join(f"<figure>{svg(chart)}</figure>" for chart in section.charts)
    return f"<h2>{escape(section.heading)}</h2>\n<section>\n{figures}\n</section>"


def _answers_html(run: Mapping[str, Any]) -> str:
    """Return some answers of a run at its best step, the worst ones if its metric judges them."""
    answers = read_answers(Path(run["directory"]), run["best_step"])
    title = f"answers of {run['directory']}"
    judge = JUDGES.get(run["metric"])
    if judge is not None:
        wrong = [answer for answer in answers if judge(answer) < 1]
        answers = sorted(wrong, key=judge)
        title = f"of {len(wrong)} wrong {title}"
    if not answers:
        return ""
    rows = [
        {
            "prompt": answer.prompt[-_SHOWN_CHARACTERS:],
            "answer": answer.predicted,
            "right": " | ".join(answer.right),
        }
        for answer in answers[:_SHOWN_ANSWERS]
    ]
    summary = f"<summary>{len(rows)} {escape(title)}</summary>"
    table = pd.DataFrame(rows).to_html(index=False, border=0)
    return f"<details>{summary}{table}</details>"
