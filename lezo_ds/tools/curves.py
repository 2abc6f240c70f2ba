"""Validation scores and losses of runs by step, from their metrics.jsonl."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pandas as pd

from lezo_ds.files import read_regular
from lezo_ds.tools.tables import DAMAGE, short, shown_score

CURVE_KEYS = ["model", "task", "train.objective", "metric"]
"""Runs with the same values of these are drawn together."""

logger = logging.getLogger(__name__)


def validation_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the texts of a table with a row for each validation of each experiment.

    The runs are those of `name_experiments`, finished or not.
    """
    rows = [
        {
            "method": row["experiment"],
            "step": short(row["step"]),
            "validation loss": short(row["loss"]),
            f"validation {row['metric']}": shown_score(row, "score"),
            "minutes": short(row["minutes"]),
        }
        for row in read_curves(runs).to_dict("records")
    ]
    return pd.DataFrame(rows)


def read_curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Return validation scores and losses of each experiment by step, as means over its runs.

    The columns are CURVE_KEYS, experiment, step, minutes, loss and score. A run whose metrics are
    damaged has no curve, and a warning says so.
    """
    keys = [*CURVE_KEYS, "experiment", "step"]
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
    for line in read_regular(directory / "metrics.jsonl").decode().splitlines():
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
