"""Charts as SVG: round ticks, curves and bars in their places, nothing of a label taken as markup."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lezo_ds.tools.reports.charts import (
    HEIGHT,
    MAX_POINTS,
    WIDTH,
    BarChart,
    LineChart,
    Series,
    draw_bars,
    draw_lines,
    group_size,
    number,
    thin,
    thin_band,
    ticks,
)

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False).map(lambda value: round(value, 6))


def places(path):
    """Return the points of a path's d attribute."""
    return [tuple(map(float, pair)) for pair in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.get("d"))]


def of_class(svg, name):
    return [part for part in ElementTree.fromstring(svg).iter() if name in (part.get("class") or "").split()]


@given(NUMBERS, NUMBERS)
def test_ticks_enclose_the_values_at_equal_distances_and_are_few(first, second):
    low, high = min(first, second), max(first, second)
    found = ticks(low, high)
    assert 2 <= len(found) <= 12
    steps = [after - before for before, after in itertools.pairwise(found)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-5) for step in steps)
    assert found[0] <= low + 1e-6 * steps[0]
    assert found[-1] >= high - 1e-6 * steps[0]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 20000, [0, 5000, 10000, 15000, 20000]), (1e-7, 1e-6, [0, 2e-7, 4e-7, 6e-7, 8e-7, 1e-6])],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high, 4 if high > 1 else 5) == pytest.approx(expected, rel=1e-9, abs=1e-20)


def test_numbers_are_short():
    values = [0.0, 12.0, 123456.7, 0.00001, -2.5, 0.123456]
    assert [number(value) for value in values] == ["0", "12", "123,457", "1e-05", "-2.5", "0.1235"]


def test_a_long_curve_becomes_means_and_extremes_of_equal_parts():
    points = [(float(x), float(x % 2)) for x in range(20 * MAX_POINTS)]
    size = group_size([points[:10], points, []])
    thinned, band = thin(points, size), thin_band(points, size)
    assert len(thinned) == len(band) == MAX_POINTS
    assert thinned[0] == (9.5, 0.5)
    assert band[0] == (9.5, 0.0, 1.0)
    assert thin(points[:20], size) == thinned[:1]
    assert group_size([points[:MAX_POINTS]]) == group_size([[]]) == group_size([]) == 1
    assert thin(points[:MAX_POINTS], 1) == points[:MAX_POINTS]
    assert len(thin(points[: MAX_POINTS + 1], group_size([points[: MAX_POINTS + 1]]))) <= MAX_POINTS
    assert thin([], 1) == []


def test_curves_bands_and_marks_lie_in_the_picture_the_higher_the_larger():
    points = [(0.0, 1.0), (10.0, 3.0), (20.0, 2.0)]
    band = [(x, y - 1, y + 1) for x, y in points]
    svg = draw_lines(LineChart("title", "x", "y", [Series("a", points, band, index=9)]))
    (line,) = of_class(svg, "line")
    assert line.get("class") == "line s1 dashed"
    (_, y0), (_, y1), (_, y2) = places(line)
    assert y1 < y2 < y0
    (area,) = of_class(svg, "band")
    for x, y in places(line) + places(area):
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
    assert len(of_class(svg, "f1")) == 1 + len(points)


def test_an_axis_from_zero_begins_there():
    def lowest_tick(from_zero):
        chart = LineChart("t", "x", "y", [Series("a", [(0.0, 50.0), (1.0, 60.0)])], from_zero=from_zero)
        return of_class(draw_lines(chart), "end")[0].text

    assert (lowest_tick(True), lowest_tick(False)) == ("0", "50")


def test_a_single_point_and_a_level_curve_can_be_drawn():
    for points in ([(3.0, 7.0)], [(0.0, 0.0), (1.0, 0.0)]):
        svg = draw_lines(LineChart("t", "x", "y", [Series("a", points)]))
        assert "nan" not in svg
        assert of_class(svg, "line")


def test_bars_are_as_long_as_their_values_and_their_parts_follow_one_another():
    svg = draw_bars(BarChart("t", "per cent", ("a", "b"), [("one", (30.0, 70.0)), ("two", (50.0, 0.0))]))
    bars = [part for part in ElementTree.fromstring(svg).iter() if part.tag == "rect"]
    widths = [float(bar.get("width")) for bar in bars]
    assert widths[1] / widths[0] == pytest.approx(7 / 3, rel=0.01)
    assert widths[2] / widths[0] == pytest.approx(5 / 3, rel=0.01)
    assert widths[3] == 0
    assert float(bars[1].get("x")) == pytest.approx(float(bars[0].get("x")) + widths[0], abs=0.2)
    assert [bar.get("class") for bar in bars] == ["f0", "f1", "f0", "f1"]


def test_bars_of_one_part_say_their_value():
    svg = draw_bars(BarChart("t", "times", ("speed",), [("one", (1.0,)), ("two", (2.5,))]))
    texts = [part.text for part in ElementTree.fromstring(svg).iter() if part.tag == "text"]
    assert "2.5" in texts


def test_labels_are_text_and_not_markup():
    wild = '<b>"x" & y</b>'
    lines = draw_lines(LineChart(wild, wild, wild, [Series(wild, [(0.0, 1.0)])]))
    bars = draw_bars(BarChart(wild, wild, (wild, wild), [(wild, (1.0, 2.0))]))
    for svg in (lines, bars):
        root = ElementTree.fromstring(svg)
        assert root.get("aria-label") == wild
        assert any(wild in (part.text or "") for part in root.iter())
        assert "b" not in {part.tag for part in root.iter()}
