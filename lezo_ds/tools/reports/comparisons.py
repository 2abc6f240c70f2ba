"""Runs and benchmarks compared: LeZO's figures 2 to 6 (Wang et al. 2024), as far as there is data."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence

from lezo_ds.tasks import get_task
from lezo_ds.tools.benchmark.results import Cell
from lezo_ds.tools.benchmark.stages import STAGES
from lezo_ds.tools.benchmark.variants import VariantName
from lezo_ds.tools.reports.blocks import Block, DataTable, Section
from lezo_ds.tools.reports.charts import BarChart, LineChart, Point, Series, number
from lezo_ds.tools.reports.records import RunRecord
from lezo_ds.tools.reports.tables import method_of

_REFERENCE = "mezo_reference"


def speedups(runs: Sequence[RunRecord], cells: Sequence[Cell]) -> Section:
    """Return how much faster than MeZO runs and steps are (figure 3)."""
    blocks: list[Block] = []
    rows = [row for group in _groups(runs, _step).values() for row in _gains(group)]
    if rows:
        header = ("run", "compared with", "computation", "convergence", "in all")
        blocks.append(DataTable(header, rows, title="Runs"))
    for cell in cells:
        first = cell.timings[0]
        if first.name.startswith(_REFERENCE):
            bars = [(timing.name, (first.seconds / timing.seconds,)) for timing in cell.timings]
            blocks.append(BarChart(_short(cell), "speed of a step, MeZO as published = 1", ("speed",), bars))
    note = (
        "Computation: ratio of the median times of a step. Convergence: ratio of the steps until the "
        "validation score first reaches the best of MeZO's best run. Times are comparable on one idle "
        "machine only."
    )
    needs = (
        "runs of mezo and lezo on one model and task, or --benchmark with mezo_reference as its first variant"
    )
    return Section("Speedup against MeZO", blocks, note, needs=needs)


def grid(runs: Sequence[RunRecord]) -> Section:
    """Return the test score over learning rate and sparsity (figure 4), a table for each model and task."""
    groups = _groups((run for run in _finished(runs) if run.sparsity), _task).values()
    tables = [table for group in groups if (table := _grid_table(group))]
    needs = "finished runs of two learning rates or sparsities: launch/sweep.py"
    return Section("Score over learning rate and sparsity", tables, needs=needs)


def over_sparsity(runs: Sequence[RunRecord], cells: Sequence[Cell]) -> Section:
    """Return the time of a step, and the best score, over sparsity (figure 5)."""
    times: list[Series] = []
    scores: list[Series] = []
    for group in _groups((run for run in runs if run.sparsity), _step).values():
        label = f"{_name(group[0])}, batches of {group[0].config.train.batch_size}"
        paces = [(run.config.zo.sparsity, run.seconds_per_step) for run in group if run.sparsity]
        tests = [
            (run.config.zo.sparsity, 100 * run.results["test"])
            for run in _finished(group)
            if run.results and run.sparsity
        ]
        _add_curve(times, label, _by_value(paces, statistics.median))
        _add_curve(scores, label, _by_value(tests, max))
    charts = _time_charts("Time of a step over sparsity", times)
    if scores:
        charts.append(LineChart("Best test score over sparsity", "sparsity", "per cent", scores))
    for cell in cells:  # each on an axis of its own: steps of other models take other times
        charts += _time_charts(f"Time of a step, {_short(cell)}", _forms(cell))
    needs = "runs of one model and task with two sparsities, or --benchmark with ours:0 and ours:0.75"
    return Section("Time and score over sparsity", charts, needs=needs)


def _forms(cell: Cell) -> list[Series]:
    """Return the time of a step over sparsity of each form of a step that was timed with several."""
    forms: dict[str, list[tuple[float | None, float | None]]] = {}
    for timing in cell.timings:
        name = VariantName.parse(timing.name)
        form = name.kind + ("" if name.forward == "dual" else f", {name.forward}")
        form += "" if name.directions == 1 else f", {name.directions} directions"
        forms.setdefault(form, []).append((name.sparsity, timing.seconds))
    series: list[Series] = []
    for form, points in forms.items():
        _add_curve(series, form, _by_value(points, statistics.median))
    return series


def _time_charts(title: str, series: Sequence[Series]) -> list[Block]:
    return [LineChart(title, "sparsity", "seconds", series, from_zero=True)] if series else []


def stages(cells: Sequence[Cell]) -> Section:
    """Return the share of a step that each stage takes (figure 2)."""
    charts = [
        BarChart(
            _short(cell),
            "per cent of a step",
            STAGES,
            [(timing.name, [100 * timing.stages[stage] for stage in STAGES]) for timing in cell.timings],
        )
        for cell in cells
    ]
    return Section("Where the time of a step goes", charts, needs="--benchmark FILE.json")


def over_length(cells: Sequence[Cell]) -> Section:
    """Return the speedup against a benchmark's first variant over the length of the inputs (figure 6)."""
    curves: dict[str, list[Point]] = {}
    for cell in cells:
        first, model = cell.timings[0], f"{cell.settings.model.shape}, {_ranks(cell)}"
        for timing in cell.timings[1:]:
            point = (float(cell.settings.workload.length), first.seconds / timing.seconds)
            curves.setdefault(f"{timing.name} to {first.name}, {model}", []).append(point)
    series: list[Series] = []
    for label, points in curves.items():
        _add_curve(series, label, sorted(points))
    chart = LineChart(
        "Speedup over input length", "tokens of an input", "times as fast", series, from_zero=True
    )
    needs = "--benchmark with several lengths or tasks"
    return Section("Speedup over input length", [chart] if series else [], needs=needs)


def _grid_table(group: Sequence[RunRecord]) -> DataTable | None:
    rates = sorted({run.learning_rate for run in group if run.learning_rate is not None})
    sparsities = sorted({run.sparsity for run in group}, key=_leading_number)
    if len(rates) * len(sparsities) < 2:
        return None
    scores: dict[tuple[float | None, str], list[float]] = {}
    for run in group:
        scores.setdefault((run.learning_rate, run.sparsity), []).append(_test(run))
    means = {key: statistics.mean(values) for key, values in scores.items()}
    low, high = min(means.values()), max(means.values())
    rows, shades = [], []
    for rate in rates:
        keys = [(rate, sparsity) for sparsity in sparsities]
        cells = (f"{means[key]:.1f} ({len(scores[key])})" if key in means else "-" for key in keys)
        rows.append([number(rate), *cells])
        shades.append([_shade(means.get(key), low, high) for key in keys])
    title = f"{_name(group[0])}, {group[0].metric}: mean in per cent (number of runs)"
    return DataTable(("learning rate / sparsity", *sparsities), rows, shades, title)


def _test(run: RunRecord) -> float:
    """Return a finished run's score in per cent."""
    assert run.results is not None, "a finished run"
    return 100 * float(run.results["test"])


def _gains(group: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """Return a line for each run of LeZO against that run of MeZO of its experiment that scored best."""
    mezo = max((run for run in group if method_of(run.config) == "mezo"), key=_best_score, default=None)
    rows = []
    for run in group:
        if mezo is None or method_of(run.config) != "lezo":
            continue
        pace = _ratio(mezo.seconds_per_step, run.seconds_per_step)
        convergence = _convergence(mezo, run)
        both = None if pace is None or convergence is None else pace * convergence
        rows.append((run.label, mezo.label, *map(_times, (pace, convergence, both))))
    return rows


def _best_score(run: RunRecord) -> float:
    return max((score for _, score in run.curve(f"dev_{run.metric}")), default=0.0)


def _convergence(mezo: RunRecord, run: RunRecord) -> float | None:
    name = f"dev_{mezo.metric}"
    theirs, ours = mezo.curve(name), run.curve(name)
    if not theirs:
        return None
    best = max(score for _, score in theirs)
    first = next(step for step, score in theirs if score == best)
    return _ratio(first, next((step for step, score in ours if score >= best), None))


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _finished(runs: Iterable[RunRecord]) -> list[RunRecord]:
    return [run for run in runs if run.results and run.results["finished"]]


def _task(run: RunRecord) -> Hashable:
    return run.config.model.path, get_task(run.config.data.task).name, run.config.peft.kind


def _step(run: RunRecord) -> Hashable:
    """Return what steps must have in common to be compared."""
    ranks = run.environment.get("world_size")
    return _task(run), run.config.model.dtype, run.config.train.batch_size, ranks


def _groups(
    runs: Iterable[RunRecord], key: Callable[[RunRecord], Hashable]
) -> dict[Hashable, list[RunRecord]]:
    groups: dict[Hashable, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def _name(run: RunRecord) -> str:
    peft = "" if run.config.peft.kind == "none" else f" {run.config.peft.kind}"
    return f"{run.config.model.path.rstrip('/').rpartition('/')[2]}, {run.config.data.task.upper()}{peft}"


def _short(cell: Cell) -> str:
    model, workload = cell.settings.model, cell.settings.workload
    blocks = f" ({model.num_blocks} blocks)" if model.num_blocks else ""
    return f"{model.shape}{blocks}, {workload.batch_size} x {workload.length} tokens, {_ranks(cell)}"


def _ranks(cell: Cell) -> str:
    return f"{cell.num_ranks} rank" + ("" if cell.num_ranks == 1 else "s")


def _by_value(
    pairs: Iterable[tuple[float | None, float | None]], combine: Callable[[Sequence[float]], float]
) -> list[Point]:
    """Return (value, its measurements combined) by rising value, those that are known."""
    found: dict[float, list[float]] = {}
    for value, measured in pairs:
        if value is not None and measured is not None:
            found.setdefault(value, []).append(measured)
    return [(value, combine(measured)) for value, measured in sorted(found.items())]


def _add_curve(series: list[Series], label: str, points: Sequence[Point]) -> None:
    """Add a curve if it has two different places."""
    if len({x for x, _ in points}) > 1:
        series.append(Series(label, points, index=len(series)))


def _shade(value: float | None, low: float, high: float) -> float | None:
    return None if value is None or high == low else (value - low) / (high - low)


def _leading_number(text: str) -> float:
    found = re.match(r"[\d.e+-]+", text)
    assert found, "a sparsity, or a number of blocks"
    return float(found[0])
