"""Curves as SVG, drawn by matplotlib (the extra `report`) without a screen and without state."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

_WIDTH = 6.0  # inches
_AXES_HEIGHT = 3.2  # inches, with the title and the labels of an axis
_LEGEND_LINE = 0.2  # inches
_LEGEND_CHARACTERS = 66
_DASHES = ("--", ":", "-.")
_GRAY = "#57606a"
# What matplotlib would write about the file, such as its date.
_METADATA = ("Creator", "Date", "Format", "Type")


@dataclass(frozen=True)
class Chart:
    """Curves over one axis, with horizontal lines to compare them with.

    Attributes:
        title: What the curves show.
        x_label: Name of the horizontal axis.
        curves: The points (x, y) of each curve, in the order of x, by its name in the legend.
        levels: The height of each horizontal line, by its name in the legend.
    """

    title: str
    x_label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    levels: Mapping[str, float]


def svg(chart: Chart) -> str:
    """Return a chart as an <svg> element, to be put into a page."""
    # Names of experiments may be longer than a line.
    labels = {name: textwrap.fill(name, _LEGEND_CHARACTERS) for name in chart.curves}
    num_legend_lines = len(chart.levels)
    num_legend_lines += sum(label.count("\n") + 1 for label in labels.values())
    height = _AXES_HEIGHT + num_legend_lines * _LEGEND_LINE
    settings = mpl.rc_context(
        {
            "svg.fonttype": "none",  # text stays text, in a font of the browser
            "svg.hashsalt": "lezo_ds",  # the same chart has the same SVG
            "text.parse_math": False,  # a dollar sign in a name begins no formula
        }
    )
    with settings:
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
        axes.set_title(chart.title)
        axes.set_xlabel(chart.x_label)
        axes.grid(visible=True, alpha=0.3)
        axes.set_prop_cycle(color=mpl.color_sequences["okabe_ito"])  # for color-blind readers, too
        for (name, level), dash in zip(chart.levels.items(), cycle(_DASHES), strict=False):
            axes.axhline(level, color=_GRAY, linestyle=dash, label=f"{name}: {level:.4g}")
        for name, points in chart.curves.items():
            xs, ys = np.array(points).T  # from [points, 2]
            axes.plot(xs, ys, marker="o", markersize=4, label=labels[name])
        if num_legend_lines > 0:
            figure.legend(loc="outside lower left", frameon=False)
        document = io.StringIO()
        figure.savefig(document, format="svg", metadata=dict.fromkeys(_METADATA))
    # A page cannot hold the XML declaration, which is before the element.
    _, tag, element = document.getvalue().partition("<svg")
    return tag + element
