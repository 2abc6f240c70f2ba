"""Small charts as SVG that a page's style colours, readable at the width of a phone. Nothing is fetched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 360
HEIGHT = 230
NUM_COLOURS = 8
"""Classes s0 to s7 of series; those of a page beyond take the same colours again, in dashes."""

MAX_POINTS = 60
"""Of the longest curve of a chart; longer ones are drawn as means: a step's loss is noisy."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 22, 10, 40
_BAR, _BAR_GAP = 16, 26
_MAX_MARKS = 20

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        label: in the legend.
        points: (x, y), by rising x.
        band: (x, lowest, highest) around the curve, by rising x; may be empty.
        index: which of the page's colours it has.
    """

    label: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()
    index: int = 0


@dataclass(frozen=True)
class LineChart:
    """Curves over a common axis; points of a curve are marked where there are few."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    from_zero: bool = False
    """Whether the vertical axis begins at 0."""


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars, each of one or several parts.

    Attributes:
        title: of the chart.
        x_label: what the length is, with its unit.
        parts: names of the parts, in their order.
        rows: (label, length of each part).
    """

    title: str
    x_label: str
    parts: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that enclose low and high.

    >>> ticks(0.0, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(3.0, 3.0)
    [2.5, 3.0, 3.5]
    """
    if not high > low:
        margin = abs(low) / 6 or 0.5
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(index * step, digits) for index in range(first, last + 1)]


def group_size(curves: Iterable[Sequence[Point]]) -> int:
    """Return how many points in a row are drawn as one, in all curves of a chart alike."""
    return math.ceil(max(map(len, curves), default=0) / MAX_POINTS) or 1


def thin(points: Sequence[Point], size: int) -> list[Point]:
    """Return the means of `size` consecutive points each."""
    return [_mean_point(points[start : start + size]) for start in range(0, len(points), size)]


def thin_band(points: Sequence[Point], size: int) -> list[tuple[float, float, float]]:
    """Return the extremes around each of the points of `thin`."""
    pieces = [points[start : start + size] for start in range(0, len(points), size)]
    return [(_mean_point(piece)[0], min(y for _, y in piece), max(y for _, y in piece)) for piece in pieces]


def number(value: float) -> str:
    """Return a number as axes and tables show it.

    >>> [number(value) for value in (20000.0, 0.25, 1e-06, 0.9266055)]
    ['20,000', '0.25', '1e-06', '0.9266']
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def draw_lines(chart: LineChart) -> str:
    """Return a line chart as an SVG element; at least one series has a point."""
    points = [point for series in chart.series for point in series.points]
    heights = [y for _, y in points] + [y for s in chart.series for _, *ys in s.band for y in ys]
    x_ticks = ticks(min(x for x, _ in points), max(x for x, _ in points), 4)
    y_ticks = ticks(min([0.0, *heights] if chart.from_zero else heights), max(heights))
    x_axis = _Axis(x_ticks[0], x_ticks[-1], _LEFT, WIDTH - _RIGHT)
    y_axis = _Axis(y_ticks[0], y_ticks[-1], HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(x_axis, y_axis, x_ticks, y_ticks, HEIGHT), *_labels(chart.x_label, chart.y_label, HEIGHT)]
    for series in chart.series:
        parts += _curve(series, x_axis, y_axis)
    return _svg(chart.title, HEIGHT, parts)


def draw_bars(chart: BarChart) -> str:
    """Return a bar chart as an SVG element; a row's label stands above its bar."""
    longest = max(sum(values) for _, values in chart.rows)
    x_ticks = ticks(0.0, longest, 4)
    height = _TOP + len(chart.rows) * (_BAR + _BAR_GAP) + _BOTTOM
    x_axis = _Axis(0.0, x_ticks[-1], 8, WIDTH - 24)
    y_axis = _Axis(0.0, 1.0, height - _BOTTOM, _TOP)
    parts = [*_grid(x_axis, y_axis, x_ticks, [], height), *_labels(chart.x_label, "", height)]
    for row, (label, values) in enumerate(chart.rows):
        top = _TOP + row * (_BAR + _BAR_GAP)
        parts.append(f'<text x="8" y="{top + 14}">{escape(label)}</text>')
        begin = 0.0
        for index, value in enumerate(values):
            left, right = x_axis.place(begin), x_axis.place(begin + value)
            name = f"{chart.parts[index]}: " if len(chart.parts) > 1 else ""
            parts.append(
                f'<rect class="f{index % NUM_COLOURS}" x="{left:.1f}" y="{top + 19}" '
                f'width="{max(0.0, right - left):.1f}" height="{_BAR}">'
                f"<title>{escape(name)}{number(value)}</title></rect>"
            )
            begin += value
        if len(chart.parts) == 1:
            parts.append(_value_label(number(begin), x_axis.place(begin), top + 31))
    return _svg(chart.title, height, parts)


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    begin: float
    end: float

    def place(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def _mean_point(points: Sequence[Point]) -> Point:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _grid(
    x_axis: _Axis, y_axis: _Axis, x_ticks: Iterable[float], y_ticks: Iterable[float], height: float
) -> list[str]:
    parts = []
    for value in y_ticks:
        y = y_axis.place(value)
        parts.append(f'<path class="grid" d="M{x_axis.begin} {y:.1f}H{x_axis.end}"/>')
        parts.append(f'<text class="end" x="{x_axis.begin - 5}" y="{y + 4:.1f}">{number(value)}</text>')
    for value in x_ticks:
        x = x_axis.place(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {y_axis.begin}V{y_axis.end}"/>')
        parts.append(f'<text class="middle" x="{x:.1f}" y="{height - _BOTTOM + 15}">{number(value)}</text>')
    return parts


def _labels(x_label: str, y_label: str, height: float) -> list[str]:
    middle = (height - _BOTTOM + _TOP) / 2
    parts = [f'<text class="middle" x="{(WIDTH + _LEFT) / 2}" y="{height - 7}">{escape(x_label)}</text>']
    if y_label:
        parts.append(
            f'<text class="middle" transform="translate(11 {middle}) rotate(-90)">{escape(y_label)}</text>'
        )
    return parts


def _curve(series: Series, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    def place(x: float, y: float) -> str:
        return f"{x_axis.place(x):.1f} {y_axis.place(y):.1f}"

    colour = series.index % NUM_COLOURS
    dashed = " dashed" if series.index >= NUM_COLOURS else ""
    parts = []
    if series.band:
        upper = [place(x, high) for x, _, high in series.band]
        lower = [place(x, low) for x, low, _ in reversed(series.band)]
        parts.append(f'<path class="band f{colour}" d="M{"L".join([*upper, *lower])}Z"/>')
    line = "L".join(place(x, y) for x, y in series.points)
    parts.append(f'<path class="line s{colour}{dashed}" d="M{line}"/>')
    if len(series.points) <= _MAX_MARKS:
        parts += [
            f'<circle class="f{colour}" cx="{x_axis.place(x):.1f}" cy="{y_axis.place(y):.1f}" r="2.6">'
            f"<title>{escape(series.label)}: {number(x)}, {number(y)}</title></circle>"
            for x, y in series.points
        ]
    return parts


def _value_label(text: str, x: float, y: float) -> str:
    kind, shift = ("end value", -4) if x > WIDTH - 60 else ("", 4)  # at the edge it stands in the bar
    return f'<text class="{kind}" x="{x + shift:.1f}" y="{y}">{text}</text>'


def _svg(title: str, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
