"""Scores of runs in the layout of LeZO's tables (Wang et al. 2024), next to the numbers of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from lezo_ds.config import paper
from lezo_ds.tasks.metrics import REWARD
from lezo_ds.tools.reports.experiments import task_title
from lezo_ds.tools.reports.results_table import over_seeds

_COLUMNS = ["model", "method", "task", "metric", "source", "mean", "deviation", "runs"]


def score_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each score, in the order of the paper's tables.

    Args:
        runs: of `name_experiments`; only the finished ones count.

    Returns:
        Columns model; method (with settings where they differ; also "majority class"); task; metric;
        source ("runs" or "paper"); mean and sample standard deviation over seeds, in the unit of
        `shown_unit`; runs (their number). The paper's rows, for its models, follow those of the same method.
    """
    done = runs[runs["finished"]]
    parts = [pd.DataFrame(columns=_COLUMNS)]
    for model, of_model in done.groupby("model"):
        majority = _measured(of_model.assign(setting="majority class"), "majority_class")
        parts.append(majority.assign(deviation=None, runs=None))  # it does not depend on a run
        for (title, method, peft), group in of_model.groupby(["title", "method", "peft"], sort=False):
            parts.append(_measured(group, "test"))
            cells = [paper.Experiment(model, task, method, peft) for task in of_model["task"].unique()]
            parts.append(_published(f"{title} (paper)", cells))
    scores = pd.concat(parts, ignore_index=True)
    return scores.astype({"mean": float, "deviation": float, "runs": "Int64"}).round(4)


def paper_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the scores of one model as texts: a row for each method, a column for each task.

    If there are several tasks with scores in percent, a column "average" has the mean over all, "-" if one is
    missing.
    """
    methods, found = scores["method"].unique(), scores["task"].unique()
    tasks = sorted(found, key=[*paper.PAPER_TASKS, *found].index)
    values = zip(scores["mean"], scores["deviation"], scores["runs"], scores["metric"], strict=True)
    texts = scores.assign(
        text=[score_text(mean, spread, runs, metric=metric) for mean, spread, runs, metric in values]
    )
    table = texts.pivot(index="method", columns="task", values="text").reindex(methods)[tasks].fillna("-")
    if len(tasks) > 1 and scores["metric"].dropna().map(is_share).all():
        means = scores.pivot(index="method", columns="task", values="mean").mean(axis=1, skipna=False)
        table["average"] = means.map(lambda mean: "-" if pd.isna(mean) else score_text(mean))
    return table.rename(columns=task_title).rename_axis(columns=None).reset_index()


def is_share(metric: str | None) -> bool:
    """Return whether a metric, by its name, is a share, which reports show in percent. A reward is not."""
    return metric != REWARD


def shown_unit(metric: str | None) -> tuple[float, str]:
    """Return the factor and the sign with which reports show a metric."""
    return (100.0, "%") if is_share(metric) else (1.0, "")


def score_text(
    mean: float, deviation: float | None = None, runs: float | None = None, *, metric: str | None = None
) -> str:
    """Return a score, in the unit of `shown_unit`, as "mean ± deviation (runs)", without what is missing."""
    digits = 1 if is_share(metric) else 3
    # 75.35 as a float lies just below itself, but the paper rounds it up.
    spread = "" if deviation is None or pd.isna(deviation) else f" ± {deviation + 1e-9:.{digits}f}"
    return f"{mean + 1e-9:.{digits}f}{spread}" + ("" if runs is None or pd.isna(runs) else f" ({runs:.0f})")


def shown_score(score: float, deviation: float = math.nan, *, metric: str | None) -> str:
    """Return a measured score and its deviation in the unit of `shown_unit`, with its sign."""
    factor, sign = shown_unit(metric)
    return score_text(factor * score, factor * deviation, metric=metric) + sign


def layout_note(scores: pd.DataFrame) -> str:
    """Return what the numbers of the tables mean."""
    by_metric = scores.dropna(subset=["metric"]).groupby("metric", sort=False)["task"].unique()
    measures = {
        metric: f"{metric} of {', '.join(map(task_title, tasks))}" for metric, tasks in by_metric.items()
    }
    shares = "; ".join(text for metric, text in measures.items() if is_share(metric))
    parts = [f"Percent: {shares}."] if shares else []
    parts += [f"Not in percent: {text}." for metric, text in measures.items() if not is_share(metric)]
    note = " ".join([*parts, "Mean ± sample standard deviation over seeds (number of runs)."])
    has_paper = (scores["source"] == "paper").any()
    return note + (" (paper): Wang et al. 2024, five seeds where there is a deviation." if has_paper else "")


def to_markdown(scores: pd.DataFrame) -> str:
    """Return a table for each model as Markdown."""
    tables = [
        f"## {name}\n\n{_markdown_table(paper_table(rows))}\n" for name, rows in scores.groupby("model")
    ]
    return "\n".join([*tables, layout_note(scores), ""])


def _markdown_table(frame: pd.DataFrame) -> str:
    """Return a table of texts as Markdown that is readable as plain text, too."""
    rows = [[str(value).replace("|", "\\|") for value in row] for row in [frame.columns, *frame.to_numpy()]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


def _measured(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the rows of a column over the seeds of each setting."""
    summary = over_seeds(runs, ["model", "setting", "task", "metric"]).dropna(subset=[column])
    factors = summary["metric"].map(lambda metric: shown_unit(metric)[0]).astype(float)
    return pd.DataFrame(
        {
            **summary[["model", "task", "metric", "runs"]],
            "method": summary["setting"],
            "source": "runs",
            "mean": factors * summary[column],
            "deviation": factors * summary[f"{column}_deviation"],
        }
    )[_COLUMNS]


def _published(method: str, cells: Sequence[paper.Experiment]) -> pd.DataFrame:
    found = {cell: paper.PAPER_SCORES[cell] for cell in cells if cell in paper.PAPER_SCORES}
    rows = [
        (cell.model, method, cell.task, None, "paper", score.mean, score.deviation, None)
        for cell, score in found.items()
    ]
    return pd.DataFrame(rows, columns=_COLUMNS)
