"""The pictures of LeZO's figures 2, 5 and 6, of measured steps, and of how they grow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from lezo_ds.tools.benchmark.growth import Series, find_series
from lezo_ds.tools.benchmark.results import Cell
from lezo_ds.tools.benchmark.stages import STAGES

mpl.use("agg")
_BAR_INCHES = 0.3
_PANEL_INCHES = 4.5


def draw(cells: Sequence[Cell], out: Path, *, processor: bool = False) -> list[Path]:
    """Draw what the cells allow and return the files.

    OUT-stages.png: the share of each stage in a step, of each variant (figure 2). OUT-speedup.png: the
    speedup to the first variant over the tokens of a batch (figure 6). OUT-growth.png: the time of a step
    over parameters, tokens, sparsity (figure 5), ranks and micro-batches, with a line fitted to each.

    Args:
        cells: measured with any settings.
        out: the files' path up to the dash.
        processor: by processor time.
    """
    series = find_series(cells, processor=processor)
    made = []
    if cells:
        made.append(_save(_stages(cells), out, "stages"))
    if any(entry.axis == "tokens" for entry in series):
        made.append(_save(_speedups(cells, processor), out, "speedup"))
    if series:
        made.append(_save(_growth(series, processor), out, "growth"))
    return made


def _save(figure: Any, out: Path, name: str) -> Path:  # noqa: ANN401
    path = out.with_name(f"{out.name}-{name}.png")
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)
    return path


def _title(cell: Cell) -> str:
    workload = cell.settings.workload
    blocks = cell.settings.model.num_blocks
    shape = cell.settings.model.shape + (f", {blocks} blocks" if blocks else "")
    group = cell.settings.model.partition_size
    sharing = f", weights shared by {group}" if group else ""
    return f"{shape}, {workload.batch_size} x {workload.length}, {cell.num_ranks} ranks{sharing}"


def _stages(cells: Sequence[Cell]) -> Any:  # noqa: ANN401
    bars = [(f"{timing.name}   ({_title(cell)})", timing.stages) for cell in cells for timing in cell.timings]
    figure, axes = plt.subplots(figsize=(8, 1 + _BAR_INCHES * len(bars)))
    labels = [label for label, _ in bars]
    places = range(len(bars))
    left = [0.0] * len(bars)
    for stage in STAGES:
        shares = [100 * stages[stage] for _, stages in bars]
        axes.barh(places, shares, left=left, label=stage)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlabel("share of a step, %")
    axes.legend(ncols=len(STAGES), loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure


def _speedups(cells: Sequence[Cell], processor: bool) -> Any:  # noqa: ANN401
    curves: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        first = cell.timings[0]
        model = f"{cell.settings.model.shape}, {cell.num_ranks} ranks"
        for timing in cell.timings[1:]:
            label = f"{timing.name} to {first.name} ({model})"
            gain = first.median(processor) / timing.median(processor)
            curves.setdefault(label, []).append((cell.settings.workload.num_tokens, gain))
    figure, axes = plt.subplots(figsize=(7, _PANEL_INCHES))
    for label, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set_xlabel("tokens of a batch")
    axes.set_ylabel("speedup")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    return figure


def _growth(series: Sequence[Series], processor: bool) -> Any:  # noqa: ANN401
    found = list(dict.fromkeys(entry.axis for entry in series))
    size = (_PANEL_INCHES * len(found), _PANEL_INCHES)
    figure, panels = plt.subplots(1, len(found), figsize=size, squeeze=False)
    for axis, panel in zip(found, panels[0], strict=True):
        for entry in series:
            if entry.axis == axis:
                _plot_with_line(panel, entry)
        panel.set_xlabel(axis)
        panel.set_ylabel("processor time of a step, s" if processor else "step, s")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.15))
    return figure


def _plot_with_line(panel: Any, entry: Series) -> None:  # noqa: ANN401
    places, seconds = zip(*entry.points, strict=True)
    (dots,) = panel.plot(places, seconds, "o", label=entry.label)
    line = [entry.intercept + entry.slope * place for place in places]
    panel.plot(places, line, "--", color=dots.get_color())
