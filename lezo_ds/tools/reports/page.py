"""One self-contained HTML page of runs and benchmarks: tables, figures, and a template."""

from __future__ import annotations

import os
from pathlib import Path

import jinja2
import pandas as pd
import plotly.io
import plotly.offline
from markupsafe import Markup

from lezo_ds.tools.reports.curves import read_metrics, seconds_per_step
from lezo_ds.tools.reports.experiments import best_rates, task_title
from lezo_ds.tools.reports.figures import Figure, benchmark_figures, experiment_figures
from lezo_ds.tools.reports.paper_layout import (
    layout_note,
    paper_table,
    score_table,
    score_text,
    shown_score,
    shown_unit,
)
from lezo_ds.tools.reports.results_table import best_setting, over_seeds, varying_columns

BEST_RATES = " Each method is shown at the learning rate with the lowest validation loss."

_ALWAYS_SHOWN = ("method", "test", "directory")
_BUTTONS = [["toImage", "zoom2d", "pan2d", "resetScale2d"]]


def render(runs: pd.DataFrame, benchmarks: pd.DataFrame | None) -> str:
    """Return the page.

    Args:
        runs: of `name_experiments`, finished or not; may be empty.
        benchmarks: rows of lezo_ds.tools.benchmark.table; None if there are none.
    """
    metrics = read_metrics(runs)
    shown = best_rates(runs)
    scores = score_table(shown)
    experiments = [group for _, group in shown.groupby(["model", "task"], sort=False)]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["plot_html"] = _plot_html
    return environment.get_template("page.html.jinja").render(
        plotly_js=Markup(plotly.offline.get_plotlyjs()),
        headlines=[_headline(group) for group in experiments],
        tables=[(model, paper_table(rows)) for model, rows in scores.groupby("model")],
        tables_note=layout_note(scores) + (BEST_RATES if len(shown) < len(runs) else ""),
        runs=_run_table(runs, seconds_per_step(metrics)),
        figures=[
            *((_title(group), experiment_figures(group, runs, metrics)) for group in experiments),
            ("Benchmarks", [] if benchmarks is None else benchmark_figures(benchmarks)),
        ],
    )


def _plot_html(figure: Figure, number: int) -> Markup:
    plot = figure[1]
    html = plotly.io.to_html(
        plot,
        config={"responsive": True, "displaylogo": False, "modeBarButtons": _BUTTONS},
        include_plotlyjs=False,
        full_html=False,
        default_height=f"{plot.layout.height}px",
        div_id=f"figure-{number}",
    )
    return Markup(html)  # plotly escapes < and > in the strings of the script that it writes


def _title(runs: pd.DataFrame) -> str:
    return f"{task_title(runs['task'].iloc[0])}, {runs['model'].iloc[0]}"


def _headline(runs: pd.DataFrame) -> dict[str, str]:
    """Return the result of one model and task: of the lowest validation loss, else of the best test score."""
    summary = over_seeds(runs, ["setting"])
    best = best_setting(summary)
    if best is None and not summary["test"].isna().all():
        best = summary["test"].idxmax()
    if best is None:
        return {"title": _title(runs), "method": "", "score": "-", "note": "no finished run"}
    row = summary.loc[best]
    levels = {"zero-shot": row["zero_shot"], "majority class": row["majority_class"]}
    metric = runs["metric"].dropna().iloc[0]
    factor, _ = shown_unit(metric)
    notes = [f"{metric}, {row['finished']} of {row['runs']} runs"]
    notes += [
        f"{name} {score_text(factor * level, metric=metric)}"
        for name, level in levels.items()
        if pd.notna(level)
    ]
    score = shown_score(row["test"], row["test_deviation"], metric=metric)
    return {"title": _title(runs), "method": row["setting"], "score": score, "note": ", ".join(notes)}


def _test_text(run: pd.Series) -> str | None:
    return None if pd.isna(run["test"]) else shown_score(run["test"], metric=run["metric"])


def _run_table(runs: pd.DataFrame, pace: pd.Series) -> tuple[str, pd.DataFrame]:
    """Return a caption with what is the same for all runs, and a row of texts for each run.

    Args:
        runs: of `name_experiments`.
        pace: seconds per step, by directory.
    """
    # The page is made to be shown, so it does not say where the runs lie on this machine.
    root = os.path.commonpath([str(Path(path).absolute().parent) for path in runs["directory"]] or [""])
    directories = runs["directory"].map(lambda path: os.path.relpath(path, root))
    columns = {
        "model": ("{}", runs["model"]),
        "task": ("{}", runs["task"].map(task_title)),
        "method": ("{}", runs["setting"]),
        "test": ("{}", runs.apply(_test_text, axis=1)),
        "seed": ("{:.0f}", runs["seed"]),
        "validation loss": ("{:.5g}", runs["best_dev_loss"]),
        "steps": ("{:.0f}", runs["steps"]),
        "seconds per step": ("{:.3g}", runs["directory"].map(pace)),
        "peak memory, GB": ("{:.2f}", runs["peak_memory_bytes"] / 1e9),
        "state": ("{}", runs["problem"].where(~runs["finished"], "finished")),
        "directory": ("{}", directories),
    }
    texts = {name: values.map(text.format, na_action="ignore") for name, (text, values) in columns.items()}
    table = pd.DataFrame(texts).astype(object).fillna("-")
    varying = varying_columns(table, table.columns)
    same = [name for name in table.columns if name not in (*varying, *_ALWAYS_SHOWN)]
    facts = [f"{name} {table[name].iloc[0]}" for name in same if (table[name] != "-").any()]
    return ", ".join(facts), table.drop(columns=same)
