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

_SIZE = (6.0, 3.2)  # inches, with the title and the labels of an axis, but without the legend
_LEGEND_CHARACTERS = 66
_DASHES = ("--", ":", "-.")
_GRAY = "#57606a"


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
    # Text stays text, in a font of the browser, and a dollar sign in a name begins no formula.
    with mpl.rc_context({"svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=_SIZE)
        axes = figure.subplots()
        axes.set_title(chart.title)
        axes.set_xlabel(chart.x_label)
        axes.grid(visible=True, alpha=0.3)
        axes.set_prop_cycle(color=mpl.color_sequences["okabe_ito"])  # for color-blind readers, too
        for (name, level), dash in zip(chart.levels.items(), cycle(_DASHES), strict=False):
            axes.axhline(level, color=_GRAY, linestyle=dash, label=f"{name}: {level:.4g}")
        for name, points in chart.curves.items():
            xs, ys = np.array(points).T  # from [points, 2]
            # Names of experiments may be longer than a line.
            label = textwrap.fill(name, _LEGEND_CHARACTERS)
            axes.plot(xs, ys, marker="o", markersize=4, label=label)
        if axes.lines:
            axes.legend(loc="upper left", bbox_to_anchor=(0, -0.18), frameon=False)
        document = io.StringIO()
        # The image grows by the legend below the axes.
        figure.savefig(document, format="svg", bbox_inches="tight")
    # A page cannot hold the XML declaration, which is before the element.
    _, tag, element = document.getvalue().partition("<svg")
    return tag + element
