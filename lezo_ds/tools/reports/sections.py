"""A page's sections: what runs came to, their courses, and what they were made with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lezo_ds.recipes.paper import PAPER_TASKS
from lezo_ds.runs.metrics import clock
from lezo_ds.tasks import get_task
from lezo_ds.tools.benchmark.results import Results
from lezo_ds.tools.reports.blocks import Block, DataTable, Section
from lezo_ds.tools.reports.charts import LineChart, Series, group_size, number, thin, thin_band
from lezo_ds.tools.reports.comparisons import grid, over_length, over_sparsity, speedups, stages
from lezo_ds.tools.reports.records import RunRecord
from lezo_ds.tools.reports.tables import Report, Table, method_of, table_lines

_MOST_NAMES = 3
"""Of runs at the head of a column."""


def make_sections(
    runs: Sequence[RunRecord], report: Report | None, benchmarks: Sequence[Results]
) -> list[Section]:
    """Return all sections, also those without anything in them.

    Args:
        runs: finished or not.
        report: the tables of those that are finished; None if none is.
        benchmarks: of launch/benchmark.py.
    """
    cells = [cell for results in benchmarks for cell in results.cells]
    return [
        _runs(runs),
        _paper_tables(report),
        _courses(runs),
        _gradients(runs),
        speedups(runs, cells),
        grid(runs),
        over_sparsity(runs, cells),
        stages(cells),
        over_length(cells),
        _environment(runs, benchmarks),
    ]


def _runs(runs: Sequence[RunRecord]) -> Section:
    header = ("run", "model", "task", "method", "sparsity", "learning rate", "steps", "time", "s a step")
    scores = ("zero-shot", "test", "majority class", "best step", "peak memory")
    rows = []
    for run in runs:
        results = run.results or {}
        rate, pace = run.learning_rate, run.seconds_per_step
        last = run.entries[-1] if run.entries else {"step": 0, "seconds": 0.0}
        peak = results.get("peak_memory_bytes")
        state = "" if results.get("finished") else " (unfinished)"
        rows.append(
            (
                run.label,
                run.config.model.path.rstrip("/").rpartition("/")[2],
                PAPER_TASKS[get_task(run.config.data.task).name].title,
                method_of(run.config)
                + ("" if run.config.peft.kind == "none" else f" {run.config.peft.kind}"),
                run.sparsity or "-",
                "-" if rate is None else number(rate),
                f"{max((e['step'] for e in run.entries), default=0):,}{state}",
                clock(last["seconds"]),
                "-" if pace is None else number(pace),
                *(_per_cent(results.get(name)) for name in ("zero_shot", "test", "majority_class")),
                "-" if results.get("best_step") is None else f"{results['best_step']:,}",
                "-" if peak is None else f"{peak / 1e9:.2f} GB",
            )
        )
    note = "Scores are per cent. A score near the majority class's has learned nothing."
    return Section("Runs", [DataTable((*header, *scores), rows)] if rows else [], note, needs="runs")


def _paper_tables(report: Report | None) -> Section:
    blocks = [_paper_table(table) for table in report.tables] if report else []
    note = (
        "Per cent: accuracy, token F1 for SQuAD and DROP. Mean +- sample deviation over seeds (number of "
        "runs). (paper): Wang et al. 2024."
    )
    warnings = report.warnings if report else ()
    return Section("Scores beside the paper's", blocks, note, warnings, "a finished run")


def _paper_table(table: Table) -> DataTable:
    header, *rows = table_lines(table)
    return DataTable(header, rows, title=table.model)


def _courses(runs: Sequence[RunRecord]) -> Section:
    charts: list[Block] = []
    longest = max((run.entries[-1]["seconds"] for run in runs if run.entries), default=0.0)
    unit, seconds = _time_unit(longest)
    splits = ("loss", "Training loss", "loss"), ("dev_loss", "Validation loss", "loss")
    metrics = list(dict.fromkeys(run.metric for run in runs))
    scores = [(f"dev_{metric}", f"Validation {metric}", metric) for metric in metrics]
    for name, title, label in (*splits, *scores):
        for over, x_label, scale in (("step", "step", 1.0), ("seconds", f"time, {unit}", seconds)):
            curves = [[(x / scale, y) for x, y in run.curve(name, over)] for run in runs]
            size = group_size(curves)
            series = [
                Series(run.label, thin(points, size), index=index)
                for index, (run, points) in enumerate(zip(runs, curves, strict=True))
                if points
            ]
            if series:
                end = "step" if over == "step" else "time"
                charts.append(LineChart(f"{title} over {end}", x_label, label, series))
    note = (
        "Training losses are means of consecutive steps where there are many. Times are comparable between "
        "runs of one machine only."
    )
    needs = "runs with a metrics.jsonl"
    return Section("Loss and score over steps and time", charts, note, needs=needs)


def _gradients(runs: Sequence[RunRecord]) -> Section:
    curves = [run.curve("projected_gradient") for run in runs]
    size = group_size(curves)
    series = [
        Series(run.label, thin(points, size), thin_band(points, size) if size > 1 else (), index)
        for index, (run, points) in enumerate(zip(runs, curves, strict=True))
        if points
    ]
    charts = [LineChart("Projected gradient over steps", "step", "g", series)] if series else []
    note = (
        "g = (loss at theta + mu z - loss at theta - mu z) / (2 mu). Line: means of consecutive "
        "steps where there are many; around it their extremes."
    )
    return Section("Projected gradient", charts, note, needs="runs of LeZO or MeZO")


def _environment(runs: Sequence[RunRecord], benchmarks: Sequence[Results]) -> Section:
    made = [(run.label, run.environment) for run in runs if run.environment]
    made += [(f"benchmark {index}", results.facts) for index, results in enumerate(benchmarks, 1)]
    facts = [(label, _facts(environment)) for label, environment in made]
    names = list(dict.fromkeys(name for _, found in facts for name in found))
    # A column for each environment, not for each run: seeds share one.
    columns: dict[tuple[str, ...], list[str]] = {}
    for label, found in facts:
        columns.setdefault(tuple(found.get(name, "-") for name in names), []).append(label)
    header = ("", *map(_several, columns.values()))
    rows = [(name, *(found[index] for found in columns)) for index, name in enumerate(names)]
    commands = [(label, _command(environment)) for label, environment in made]
    note = (
        "A run is repeated, or resumed, by its command; config.yaml in its directory has every key. "
        "Runs of several ranks may be started by srun or mpirun as well: see launch."
    )
    blocks = [DataTable(header, rows, is_text=True)] if rows else []
    return Section("Made with", blocks, note, needs="runs", commands=commands)


def _several(labels: Sequence[str]) -> str:
    """Return the names of runs; of many, the first."""
    shown = "; ".join(labels[:_MOST_NAMES])
    return shown if len(labels) <= _MOST_NAMES else f"{shown} and {len(labels) - _MOST_NAMES} more"


def _command(environment: Mapping[str, Any]) -> str:
    """Return what starts a run with as many ranks: a rank knows its own command line, not its launcher's."""
    _, script, *arguments = environment["command"]
    ranks = environment["world_size"]
    launcher = ["python"] if ranks == 1 else ["deepspeed", "--num_gpus", str(ranks)]
    own = [argument for argument in arguments if not argument.startswith("--local_rank")]
    return shlex.join([*launcher, script, *own])


def _facts(environment: Mapping[str, Any]) -> dict[str, str]:
    hardware = environment["hardware"]
    device = hardware["gpu"] or environment.get("processor") or hardware["cpu"] or hardware["device"]
    return {
        "device": device,
        "cores": str(hardware["cores"]),
        "ranks": str(environment["world_size"]),
        "threads": str(environment["threads"]),
        "platform": environment["platform"],
        **environment["versions"],
    }


def _per_cent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _time_unit(longest: float) -> tuple[str, float]:
    """Return a unit of time that suits a duration in seconds, and its seconds."""
    if longest < 300:
        return "s", 1.0
    return ("min", 60.0) if longest < 3 * 3600 else ("h", 3600.0)
