"""The figures of a page, as pairs of a title and a plotly figure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from html import escape
from itertools import cycle
from typing import Any

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from lezo_ds.tools.reports.curves import mean_curves, speedups
from lezo_ds.tools.reports.experiments import values_text
from lezo_ds.tools.reports.paper_layout import shown_unit
from lezo_ds.tools.reports.results_table import RATES, over_seeds, settings_columns, varying_columns

Figure = tuple[str, go.Figure]

COLORS = [
    *("#3b82f6", "#f0801f", "#22a35a", "#c14ed8", "#e0476a", "#0fa3b5", "#8b7cf6", "#a3812b"),
    *("#84cc16", "#94a3b8", "#f472b6", "#b45309"),
]
"""Legible on white and on black; more curves take them again."""

_HEIGHT, _ROW = 320, 22  # pixels: of a line chart, and of a row of its legend or a bar

_CASE = [
    *("model", "data", "shape", "layers", "dtype", "ds_config", "length", "batch", "micro_batches"),
    *("ranks", "partition_size", "threads", "machine", "reference"),
]
"""What a row of a benchmark was measured on, and compared with."""


def experiment_figures(runs: pd.DataFrame, all_runs: pd.DataFrame, metrics: pd.DataFrame) -> list[Figure]:
    """Return the figures of one model and task, as far as there is data.

    Args:
        runs: of `best_rates`, of the model and the task.
        all_runs: of `name_experiments`, of all learning rates, models and tasks.
        metrics: of `read_metrics`, of these and any other runs.
    """
    metrics = metrics[metrics["directory"].isin(runs["directory"])]
    metrics = metrics.assign(setting=metrics["directory"].map(runs.set_index("directory")["setting"]))
    same = all_runs["model"].isin(runs["model"]) & all_runs["task"].isin(runs["task"])
    metric = next(iter(runs["metric"].dropna()), "score")
    gains = speedups(runs, metrics).melt("setting", var_name="part")
    # One color for a setting in all figures, also in those that lack some of the others.
    colors = dict(zip(map(_label, metrics["setting"].unique()), cycle(COLORS), strict=False))
    figures = {
        "Validation loss over steps": _curves(metrics, "dev_loss", "step", colors),
        f"Validation {metric} over steps": _curves(metrics, f"dev_{metric}", "step", colors),
        "Training loss over steps": _curves(metrics, "loss", "step", colors),
        # With the same number of forward passes in all steps, this figure would repeat the first.
        "Validation loss over forward passes": _curves(metrics, "dev_loss", "forward_passes", colors)
        if runs["passes_per_step"].nunique() > 1
        else go.Figure(),
        "Validation loss over training time": _curves(metrics, "dev_loss", "minutes", colors),
        f"Test {metric} over sparsity": _scores_over(runs, "zo.sparsity"),
        f"Test {metric} over learning rate": _scores_over(all_runs[same], "zo.learning_rate"),
        "Speedup over MeZO": _bars(gains, "value", "setting", "part", "times as fast"),
    }
    return [(title, plot) for title, plot in figures.items() if plot.data]


def benchmark_figures(table: pd.DataFrame) -> list[Figure]:
    """Return a chart of how many times as fast as its reference each variant of a step is, if there are any.

    Args:
        table: rows of lezo_ds.tools.benchmark.table.
    """
    rows = table[table["measured"] == "step"]
    if rows.empty:
        return []
    keys = varying_columns(rows, _CASE)
    constant = values_text(rows.iloc[0], [key for key in _CASE if key not in keys])
    rows = rows.drop_duplicates([*keys, "variant"], keep="last").astype(object)
    rows = rows.assign(case=rows.apply(values_text, axis=1, keys=keys))
    return [(f"Speed of a step: {constant}", _bars(rows, "ratio", "case", "variant", "times as fast"))]


def _curves(metrics: pd.DataFrame, value: str, over: str, colors: Mapping[str, str]) -> go.Figure:
    """Return the mean of each setting over its seeds as a line, in a band of one deviation each way."""
    curves = mean_curves(metrics, value) if value in metrics else pd.DataFrame()
    if curves.empty:
        return go.Figure()
    curves["minutes"] = curves["seconds"] / 60
    label = f"validation {value.removeprefix('dev_')}" if value != "loss" else "training loss"
    plot = _draw(
        px.line,
        curves,
        labels={"mean": label, "forward_passes": "forward passes of the batch"},
        x=over,
        y="mean",
        color="setting",
        color_discrete_map=colors,
    )
    plot.update_traces(mode="lines+markers" if len(curves) < 200 else "lines", cliponaxis=False)
    for line, (_, curve) in zip(plot.data, curves.groupby("setting", sort=False), strict=True):
        band = curve.dropna(subset=["deviation"])
        upper, lower = band["mean"] + band["deviation"], band["mean"] - band["deviation"]
        plot.add_scatter(
            x=[*band[over], *band[over][::-1]],
            y=[*upper, *lower[::-1]],
            fill="toself",
            fillcolor=line.line.color,
            opacity=0.2,
            mode="none",
            legendgroup=line.legendgroup,
            showlegend=False,
            hoverinfo="skip",
        )
    plot.update_xaxes(range=[curves[over].min(), curves[over].max()])
    return plot


def _scores_over(runs: pd.DataFrame, key: str) -> go.Figure:
    """Return the test scores of LeZO and MeZO over a config key, and those without training as lines.

    A setting is a curve if it was run with more than one value of the key.
    """
    runs = runs[runs["finished"] & runs["method"].isin(["lezo", "mezo"])].dropna(subset=[key])
    columns = [column for column in settings_columns(runs) if column != key]
    without_rates = [column for column in columns if column not in RATES]
    if runs.groupby([*without_rates, key], dropna=False)[RATES].nunique().le(1).all(axis=None):
        columns = without_rates  # each point has one learning rate, and that may be another one
    runs = runs[runs.groupby(columns, dropna=False)[key].transform("nunique") > 1]
    if runs.empty:
        return go.Figure()
    values, others = sorted(runs[key].unique()), varying_columns(runs, columns)
    summary = over_seeds(runs, [key, *others]).sort_values(key)
    summary["setting"] = summary.apply(values_text, axis=1, keys=others) if others else "test"
    factor, sign = shown_unit(next(iter(runs["metric"].dropna()), None))
    summary[["test", "test_deviation", "zero_shot", "majority_class"]] *= factor
    labels = {
        key: key.rpartition(".")[2].replace("_", " "),
        "test": f"test score, {sign}" if sign else "test score",
    }
    plot = _draw(
        px.line,
        summary,
        x=key,
        y="test",
        color="setting",
        error_y="test_deviation",
        markers=True,
        labels=labels,
    )
    for level, name, color in (
        ("zero_shot", "zero-shot", "#8a94a6"),
        ("majority_class", "majority class", "#b0925a"),
    ):
        line = {"dash": "dot", "color": color}
        plot.add_scatter(x=summary[key], y=summary[level], name=name, mode="lines", line=line)
    is_log = key == "zo.learning_rate"
    first, last = (math.log10(end) if is_log else end for end in (values[0], values[-1]))
    margin = 0.04 * (last - first)  # room for the error bars at both ends
    plot.update_traces(cliponaxis=False)
    plot.update_xaxes(
        tickvals=values,
        ticktext=[f"{value:g}" for value in values],
        type="log" if is_log else "linear",
        range=[first - margin, last + margin],
    )
    return plot


def _bars(table: pd.DataFrame, value: str, row: str, color: str, label: str) -> go.Figure:
    """Return horizontal bars: a group for each row, and in it a bar for each color."""
    table = table.dropna(subset=[value]).astype({value: float})
    if table.empty:
        return go.Figure()
    plot = _draw(px.bar, table, x=value, y=row, color=color, text_auto=".2f", labels={value: label, row: ""})
    num_lines = table[row].map(_label).str.count("<br>") + 1
    row_height = 10 + max(_ROW * len(plot.data), 16 * int(num_lines.max()))
    height = plot.layout.height - _HEIGHT + 100 + row_height * table[row].nunique()
    plot.update_layout(barmode="group", height=height)
    plot.update_traces(textposition="outside", cliponaxis=False)
    plot.update_xaxes(range=[0, 1.25 * table[value].max()])  # leaves room for the text at the end of a bar
    plot.update_yaxes(autorange="reversed")
    return plot


def _draw(
    kind: Callable[..., go.Figure],
    table: pd.DataFrame,
    labels: Mapping[str, str],
    **options: Any,  # noqa: ANN401
) -> go.Figure:
    """Return a figure of plotly.express in the style of the page, with its legend below it.

    Names come from runs. They are escaped, because plotly reads HTML tags in texts.
    """
    texts = table.select_dtypes(["object", "str"])
    table = table.assign(**{name: texts[name].map(_label) for name in texts})
    labels = {name: escape(label) for name, label in labels.items()}
    plot = kind(table, **options, labels=labels, color_discrete_sequence=COLORS)
    rows = len(plot.data) if len(plot.data) > 1 else 0
    plot.update_layout(
        template="none",
        height=_HEIGHT + _ROW * rows,
        margin={"l": 10, "r": 16, "t": 34, "b": 10 + _ROW * rows},
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "title": None},
        modebar={"bgcolor": "rgba(0,0,0,0)"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    plot.update_xaxes(automargin=True, zeroline=False, title_standoff=8)
    plot.update_yaxes(automargin=True, zeroline=False, title_standoff=12, ticklabelstandoff=6)
    return plot


def _label(text: object) -> str:
    lines = [line for part in str(text).splitlines() for line in textwrap.wrap(part, 26)]
    return "<br>".join(map(escape, lines))
