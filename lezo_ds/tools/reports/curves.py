"""The course of runs: losses and scores by step as means over seeds, and the speedup over MeZO."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pandas as pd

from lezo_ds.config import paper
from lezo_ds.tools.reports.results_table import DAMAGE, best_setting, over_seeds

MAX_POINTS = 60
"""Number of points of a curve. Longer courses are averaged over consecutive steps."""

logger = logging.getLogger(__name__)

_COMPARABLE = ["model", "task", "peft", "model.dtype", "train.batch_size", "world_size"]
"""Columns in which runs must agree for a comparison of their speed."""


def read_metrics(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the metrics.jsonl of runs, with one row for each step and evaluation.

    Each run without curves is logged as a warning.

    Args:
        runs: of `name_experiments`.

    Returns:
        A table with the columns directory, method and setting of the run; step; forward_passes and seconds
        since its start; and, where a row has them, loss (of the training batch), dev_loss and dev_METRIC. A
        last line that a crash cut short is left out; infinite values become NaN.
    """
    names = ["directory", "method", "setting"]
    empty = pd.DataFrame(columns=["step", "forward_passes", "seconds", "loss", "dev_loss"], dtype=float)
    parts = [empty.assign(**dict.fromkeys(names, ""))]
    for run, passes in zip(runs[names].to_dict("records"), runs["passes_per_step"], strict=True):
        try:
            text = (Path(run["directory"]) / "metrics.jsonl").read_text(encoding="utf-8")
            rows = pd.DataFrame(map(json.loads, text[: text.rfind("\n") + 1].splitlines()))
            values = rows.filter(regex="^(step|seconds|loss|dev_.*)$").astype(float)
            values = values.assign(forward_passes=passes * values["step"], **run)
            parts.append(values.replace([np.inf, -np.inf], np.nan))
        except DAMAGE as error:
            problem = f"its metrics.jsonl cannot be read ({error})"
            logger.warning("warning: no curves: %s: %s", run["directory"], problem)
    return pd.concat(parts, ignore_index=True)


def seconds_per_step(metrics: pd.DataFrame) -> pd.Series:
    """Return the median time from one step to the next for each directory with consecutive steps."""
    steps = metrics.dropna(subset=["loss"])
    changes = steps.groupby("directory")[["step", "seconds"]].diff()
    return changes["seconds"][changes["step"] == 1].groupby(steps["directory"]).median()


def mean_curves(metrics: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return the curve of each experiment over its seeds.

    Args:
        metrics: of `read_metrics`, of one model and task.
        value: the column to average.

    Returns:
        Columns setting, step, forward_passes, seconds, mean and deviation (over seeds, missing for fewer than
        two), by rising step. With more than `MAX_POINTS` steps, a row is the mean of consecutive ones.
    """
    known = metrics.dropna(subset=[value])
    width = np.ceil(known["step"].nunique() / MAX_POINTS)
    group = ((known["step"].rank(method="dense") - 1) // width).rename("group")
    places = ["step", "forward_passes", "seconds"]
    by_run = known.groupby(["setting", group, "directory"], sort=False)[[*places, value]].mean()
    curves = by_run.groupby(["setting", "group"], sort=False).agg(
        **{place: (place, "mean") for place in places}, mean=(value, "mean"), deviation=(value, "std")
    )
    return curves.reset_index("setting").sort_values("step", kind="stable")


def speedups(runs: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    """Compare LeZO with MeZO, as in LeZO's figure 3, where both have learned something.

    Args:
        runs: of `name_experiments`, of one model and task.
        metrics: of `read_metrics`, of these runs.

    Returns:
        One row for each setting of LeZO: setting; computation, the ratio of the times of a step to those
        of the MeZO setting with the lowest validation loss; convergence, the ratio of the steps until the
        mean validation loss first reaches the lowest that both reach; total, their product.
    """
    rows = []
    done = runs[runs["finished"] & runs["method"].isin(["mezo", "lezo"])]
    for _, group in done.groupby(_COMPARABLE, dropna=False):
        summary = over_seeds(group, ["method", "setting", "task", "data.num_test"])
        summary = summary[has_learned(summary)]
        best = best_setting(summary[summary["method"] == "mezo"])
        if best is None:
            continue
        pace = group["directory"].map(seconds_per_step(metrics)).groupby(group["setting"]).mean()
        mezo = summary.loc[best, "setting"]
        losses = mean_curves(metrics[metrics["directory"].isin(group["directory"])], "dev_loss")
        lowest = losses.groupby("setting")["mean"].min()
        for lezo in summary.loc[summary["method"] == "lezo", "setting"]:
            both_reach = losses[losses["mean"] <= lowest.reindex([mezo, lezo]).max()]
            steps = both_reach.groupby("setting")["step"].min().reindex([mezo, lezo])
            computation, convergence = pace[mezo] / pace[lezo], steps[mezo] / steps[lezo]
            rows.append((lezo, computation, convergence, computation * convergence))
    return pd.DataFrame(rows, columns=["setting", "computation", "convergence", "total"])


def has_learned(summary: pd.DataFrame) -> pd.Series:
    """Return for each row of `over_seeds` whether its score is clearly better than without training.

    That is, the mean test score exceeds both the zero-shot score and the majority class by more than two
    standard errors of a score over the test examples.
    """
    start = summary[["zero_shot", "majority_class"]].max(axis=1)
    published = (
        summary["task"].map({name: task.num_test for name, task in paper.PAPER_TASKS.items()}).fillna(1000)
    )
    examples = summary["data.num_test"].astype(float).fillna(published)
    return summary["test"] > start + 2 * np.sqrt(start * (1 - start) / examples)
