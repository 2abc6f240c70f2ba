"""One self-contained HTML page of runs and benchmarks: tables, figures, and a template."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import plotly.io
import plotly.offline
from markupsafe import Markup

from lezo_ds.config import flatten
from lezo_ds.tools.benchmark.table import STAGES
from lezo_ds.tools.reports.curves import read_metrics, seconds_per_step
from lezo_ds.tools.reports.experiments import task_title
from lezo_ds.tools.reports.figures import Figure, benchmark_figures, experiment_figures
from lezo_ds.tools.reports.paper_layout import layout_note, paper_table, score_table, score_text
from lezo_ds.tools.reports.results_table import best_setting, over_seeds, varying_columns

_BUTTONS = [["toImage", "zoom2d", "pan2d", "resetScale2d"]]


def render(runs: pd.DataFrame, warnings: Sequence[str], benchmarks: pd.DataFrame | None) -> str:
    """Return the page.

    Args:
        runs: of `name_experiments`, finished or not; may be empty.
        warnings: shown on the page; one for each damaged metrics.jsonl is added.
        benchmarks: rows of lezo_ds.tools.benchmark.table; None if there are none.
    """
    metrics, damaged = read_metrics(runs)
    scores = score_table(runs)
    experiments = [group for _, group in runs.groupby(["model", "task"], sort=False)]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["plot_html"] = _plot_html
    return environment.get_template("page.html.jinja").render(
        plotly_js=Markup(plotly.offline.get_plotlyjs()),
        headlines=[_headline(group) for group in experiments],
        warnings=[*warnings, *damaged],
        tables=[(model, paper_table(rows)) for model, rows in scores.groupby("model")],
        tables_note=layout_note(scores),
        runs=_split_constant(_run_table(runs, seconds_per_step(metrics))),
        figures=[
            *((_title(group), experiment_figures(group, metrics)) for group in experiments),
            ("Benchmarks", [] if benchmarks is None else benchmark_figures(benchmarks, STAGES)),
        ],
        made_with=_split_constant(pd.DataFrame([_environment(Path(path)) for path in runs["directory"]])),
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
    notes = [f"{runs['metric'].dropna().iloc[0]}, {row['finished']} of {row['runs']} runs"]
    notes += [f"{name} {score_text(100 * level)}" for name, level in levels.items() if pd.notna(level)]
    score = score_text(100 * row["test"], 100 * row["test_deviation"])
    return {"title": _title(runs), "method": row["setting"], "score": f"{score} %", "note": ", ".join(notes)}


def _run_table(runs: pd.DataFrame, pace: pd.Series) -> pd.DataFrame:
    """Return a row of texts for each run; `pace` has the seconds per step by directory."""
    percent, number = _formatter("{:.1%}"), _formatter("{:,.5g}")
    return pd.DataFrame(
        {
            "model": runs["model"],
            "task": runs["task"].map(task_title),
            "method": runs["setting"],
            "test": runs["test"].map(percent),
            "zero-shot": runs["zero_shot"].map(percent),
            "majority class": runs["majority_class"].map(percent),
            "seed": runs["seed"].map(number),
            "data seed": runs["data.seed"].map(number),
            "validation loss": runs["best_dev_loss"].map(number),
            "best step": runs["best_step"].map(number),
            "steps": runs["steps"].map(number),
            "seconds": runs["seconds"].map(_formatter("{:,.1f}")),
            "seconds per step": runs["directory"].map(pace).map(_formatter("{:.3g}")),
            "peak memory, GB": (runs["peak_memory_bytes"] / 1e9).map(_formatter("{:.2f}")),
            "state": runs["problem"].where(~runs["finished"], "finished"),
            "directory": runs["directory"],
        }
    )


def _formatter(layout: str) -> Callable[[float], str]:
    return lambda value: "-" if pd.isna(value) else layout.format(value)


def _split_constant(table: pd.DataFrame) -> dict[str, Any]:
    """Return a table without the columns that are equal in all of several rows, and these as a caption.

    Method and test score always stay in the table.
    """
    varying = varying_columns(table, table.columns) if len(table) > 1 else table.columns
    kept = [name for name in table.columns if name in varying or name in ("method", "test")]
    constant = [f"{name}: {table[name].iloc[0]}" for name in table.columns if name not in kept]
    return {"table": table[kept], "caption": f"The same in all rows: {'; '.join(constant)}." * bool(constant)}


def _environment(directory: Path) -> dict[str, str]:
    """Return what environment.json says a run was made with; only the directory if it cannot be read."""
    try:
        made = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
        return {"directory": str(directory), **flatten(made | {"command": shlex.join(made["command"])})}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {"directory": str(directory)}
