"""How the time of a step grows: series of measurements that differ in one thing only, each with a line."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lezo_ds.tools.benchmark.results import Cell, Timing
from lezo_ds.tools.benchmark.variants import VariantName

Axis = Literal["parameters", "tokens", "sparsity", "ranks", "micro-batches"]
AXES: tuple[Axis, ...] = get_args(Axis)
MIN_POINTS = 3


@dataclass(frozen=True)
class Series:
    """Times of a step along one axis, and the line through them of least squares.

    Attributes:
        axis: what differs between the points.
        label: the variant; of a series over sparsities the variant without its sparsity, and what it ran.
        points: (value of the axis, seconds), by rising value.
        intercept: seconds where the axis is 0.
        slope: seconds by unit of the axis.
    """

    axis: Axis
    label: str
    points: tuple[tuple[float, float], ...]
    intercept: float
    slope: float

    @property
    def bend(self) -> float:
        """The largest distance of a point from the line, as a share of the point's time."""
        return max(abs(self.intercept + self.slope * x - y) / y for x, y in self.points)


def find_series(cells: Iterable[Cell], *, processor: bool = False) -> list[Series]:
    """Return all series of at least MIN_POINTS points, in the order of AXES.

    Args:
        cells: the measurements; of two of the same the later one counts.
        processor: processor time, which is what a CPU that does other work, too, is judged by.
    """
    entries = [(cell, timing) for cell in cells for timing in cell.timings]
    return [series for axis in AXES for series in _along(axis, entries, processor)]


def _along(axis: Axis, entries: Sequence[tuple[Cell, Timing]], processor: bool) -> list[Series]:
    groups: dict[object, tuple[str, dict[float, float]]] = {}
    for cell, timing in entries:
        value, rest, label = _place(axis, cell, VariantName.parse(timing.name))
        _, points = groups.setdefault((rest, label), (label, {}))
        points[value] = timing.median(processor)
    return [
        _fit(axis, label, sorted(points.items()))
        for label, points in groups.values()
        if len(points) >= MIN_POINTS
    ]


def _place(axis: Axis, cell: Cell, name: VariantName) -> tuple[float, object, str]:
    """Return a measurement's value on the axis, all else that it depends on, and its label."""
    settings, workload = cell.settings, cell.settings.workload
    passes = settings.num_micro_batches or cell.num_ranks
    fixed = replace(settings, num_micro_batches=passes, rounds=1)
    label = name.text
    if axis == "parameters":
        model = replace(settings.model, shape="", num_blocks=None)
        return cell.num_parameters, (replace(fixed, model=model), cell.num_ranks), label
    if axis == "tokens":
        return (
            workload.num_tokens,
            (
                replace(fixed, workload=replace(workload, length=workload.candidate_tokens + 1)),
                cell.num_ranks,
            ),
            label,
        )
    if axis == "sparsity":
        form = ":".join([name.kind, "s", *name.text.split(":")[2:]])
        form += f", {cell.num_parameters / 1e6:.0f} M weights, {workload.num_tokens} tokens"
        form += f", ranks {cell.num_ranks}, micro-batches {passes}"
        return name.sparsity, (fixed, cell.num_ranks), form
    if axis == "ranks":
        return cell.num_ranks, replace(fixed, num_micro_batches=settings.num_micro_batches), label
    return passes, (replace(fixed, num_micro_batches=None), cell.num_ranks), label


def _fit(axis: Axis, label: str, points: Sequence[tuple[float, float]]) -> Series:
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    return Series(axis, label, tuple(points), intercept, slope)
