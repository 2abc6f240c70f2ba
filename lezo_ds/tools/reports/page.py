"""One page of everything: self-contained HTML, light and dark, for screens of any width; and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from lezo_ds.errors import UserError
from lezo_ds.tools.benchmark.results import read_results
from lezo_ds.tools.reports.blocks import DataTable, Section
from lezo_ds.tools.reports.charts import NUM_COLOURS, BarChart, LineChart, draw_bars, draw_lines, number
from lezo_ds.tools.reports.records import read_records
from lezo_ds.tools.reports.sections import make_sections
from lezo_ds.tools.reports.tables import read_report

_MAX_COLUMNS = 6
"""Places at which the Markdown of a chart gives its curves."""

_MOST_IN_A_FIGURE = 4
"""Curves whose names stand below each figure; more stand once, above all figures of their section."""

_LIGHT = ("#0b62c4", "#c2410c", "#15803d", "#a21caf", "#64748b", "#0e7490", "#be123c", "#4d5bd1")
_DARK = ("#6cb2ff", "#ff9a62", "#5fd38d", "#e58cf0", "#f2c14e", "#4fd0e0", "#ff86a0", "#a5adff")

_STYLE = """
:root { --ink: #1b1f24; --dim: #57606a; --line: #d8dee4; --paper: #fff; --box: #f6f8fa;
  --shade: 11, 98, 196; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
h3, p, li, figcaption { overflow-wrap: anywhere; }
p, li { color: var(--dim); max-width: 60rem; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0; padding: .6rem; border: 1px solid var(--line); border-radius: 6px; min-width: 0; }
figcaption { font-weight: 600; font-size: .95rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; } svg .end.value { fill: var(--paper); }
.grid { stroke: var(--line); stroke-width: 1; fill: none; }
.line { fill: none; stroke-width: 1.6; stroke-linejoin: round; } .dashed { stroke-dasharray: 5 3; }
.band { opacity: .18; stroke: none; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; margin: .3rem 0 0; padding: 0; list-style: none;
  font-size: .8rem; }
.legend svg { display: inline-block; width: 22px; height: 10px; margin-right: .3rem; }
.scroll { overflow-x: auto; margin-bottom: 1rem; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; min-width: 8rem; max-width: 26rem; white-space: normal; }
.text th, .text td { text-align: left; white-space: normal; overflow-wrap: break-word; }
tr:last-child td { border-bottom: 0; }
thead th { background: var(--box); white-space: normal; max-width: 26rem; vertical-align: bottom; }
td[style] { background: rgba(var(--shade), var(--a)); }
.legend + .charts { margin-top: .8rem; }
pre { background: var(--box); padding: .6rem; border-radius: 6px; font-size: .8rem; margin: .2rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def make_page(paths: Sequence[Path], benchmarks: Sequence[Path] = ()) -> list[Section]:
    """Return the sections of a page.

    Args:
        paths: of runs, finished or not; what is none is left out.
        benchmarks: JSON files of launch/benchmark.py.

    Raises:
        UserError: there is nothing to show, or a file is damaged.
    """
    runs = read_records(paths)
    results = [read_results(path) for path in benchmarks]
    if not runs and not results:
        raise UserError(
            "there is neither a run nor a benchmark to show",
            got=", ".join(map(str, paths)) or "no path",
            expected="directories with config.yaml, or --benchmark FILE.json",
            fix="give the run_dir of a run",
        )
    has_finished = any(run.results and run.results["finished"] for run in runs)
    return make_sections(runs, read_report(paths) if has_finished else None, results)


def to_html(sections: Sequence[Section], title: str = "Zeroth-order fine-tuning") -> str:
    """Return a whole HTML document that loads nothing and runs no script."""
    shown, empty = _split(sections)
    body = "".join(_section(section) for section in shown)
    if empty:
        items = "".join(
            f"<li>{escape(section.title)}: needs {escape(section.needs)}</li>" for section in empty
        )
        body += f"<section><h2>Not shown</h2><ul>{items}</ul></section>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}{_colours()}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def to_markdown(sections: Sequence[Section], title: str = "Zeroth-order fine-tuning") -> str:
    """Return the same as Markdown, with tables in the place of charts."""
    shown, empty = _split(sections)
    lines = [f"# {title}", ""]
    for section in shown:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            table = block if isinstance(block, DataTable) else _as_table(block)
            lines += [f"### {table.title}", ""] if table.title else []
            lines += [_markdown_row(table.header), "|" + " --- |" * len(table.header)]
            lines += [*map(_markdown_row, table.rows), ""]
        lines += [section.note, ""] if section.note else []
        lines += [*(f"- Warning: {warning}" for warning in section.warnings), ""] if section.warnings else []
        for label, command in section.commands:
            lines += [f"{label}:", "", "```bash", command, "```", ""]
    if empty:
        lines += ["## Not shown", "", *(f"- {section.title}: needs {section.needs}" for section in empty)]
    return "\n".join(lines).rstrip() + "\n"


def _split(sections: Sequence[Section]) -> tuple[list[Section], list[Section]]:
    return [s for s in sections if s.blocks], [s for s in sections if not s.blocks]


def _section(section: Section) -> str:
    charts = [block for block in section.blocks if not isinstance(block, DataTable)]
    shared = _shared_legend(charts)
    figures = "".join(_figure(chart, has_legend=not shared) for chart in charts)
    warnings = "".join(f"<li>Warning: {escape(warning)}</li>" for warning in section.warnings)
    tables = "".join(_table(block) for block in section.blocks if isinstance(block, DataTable))
    parts = [
        f"<section><h2>{escape(section.title)}</h2>",
        f"<p>{escape(section.note)}</p>" if section.note else "",
        f"<ul>{warnings}</ul>" if warnings else "",
        tables,
        _legend(shared) if shared else "",
        f'<div class="charts">{figures}</div>' if figures else "",
        *(f"<h3>{escape(label)}</h3><pre>{escape(text)}</pre>" for label, text in section.commands),
        "</section>",
    ]
    return "".join(parts)


def _figure(chart: LineChart | BarChart, *, has_legend: bool) -> str:
    drawing = draw_lines(chart) if isinstance(chart, LineChart) else draw_bars(chart)
    caption = f"<figcaption>{escape(chart.title)}</figcaption>"
    legend = _legend(_names(chart)) if has_legend else ""
    return f"<figure>{caption}{drawing}{legend}</figure>"


def _names(chart: LineChart | BarChart) -> list[tuple[str, int]]:
    """Return the names in a chart's legend, each with its colour."""
    if isinstance(chart, LineChart):
        return [(series.label, series.index) for series in chart.series]
    return [(part, index) for index, part in enumerate(chart.parts)] if len(chart.parts) > 1 else []


def _shared_legend(charts: Sequence[LineChart | BarChart]) -> list[tuple[str, int]]:
    """Return the names that are to stand above all charts; none where each has few, or means others."""
    names = sorted({name for chart in charts for name in _names(chart)}, key=lambda name: name[1])
    is_one_each = len({index for _, index in names}) == len(names)
    return names if is_one_each and len(names) > _MOST_IN_A_FIGURE else []


def _legend(names: Sequence[tuple[str, int]]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 22 10"><path class="line s{index % NUM_COLOURS}'
        f'{" dashed" if index >= NUM_COLOURS else ""}" style="stroke-width:4" d="M0 5H22"/></svg>'
        f"{escape(label)}</li>"
        for label, index in names
    )
    return f'<ul class="legend">{items}</ul>'


def _table(table: DataTable) -> str:
    head = "".join(f"<th>{_breakable(text)}</th>" for text in table.header)
    rows = []
    for index, row in enumerate(table.rows):
        shades = (None, *table.shades[index]) if table.shades else (None,) * len(row)
        cells = (
            f"<td>{_breakable(text)}</td>"
            if shade is None
            else f'<td style="--a:{0.05 + 0.4 * shade:.2f}">{_breakable(text)}</td>'
            for text, shade in zip(row, shades, strict=True)
        )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    kind = "scroll text" if table.is_text else "scroll"
    scroll = f'<div class="{kind}" tabindex="0"><table><thead><tr>{head}</tr></thead>'
    return f"{title}{scroll}<tbody>{''.join(rows)}</tbody></table></div>"


def _breakable(text: str) -> str:
    """Return a cell's text, which a line may be broken in after a comma: a sweep's runs have long names."""
    return escape(text).replace(",", ",<wbr>")


def _colours() -> str:
    def rules(colours: Sequence[str]) -> str:
        return "".join(f"--c{index}:{colour};" for index, colour in enumerate(colours))

    dark = "--ink:#e6edf3;--dim:#9da7b1;--line:#30363d;--paper:#0d1117;--box:#161b22;--shade:108,178,255;"
    classes = "".join(
        f".s{index}{{stroke:var(--c{index})}}.f{index}{{fill:var(--c{index})}}"
        for index in range(NUM_COLOURS)
    )
    return (
        f":root{{{rules(_LIGHT)}}}"
        f"@media (prefers-color-scheme: dark){{:root{{{rules(_DARK)}{dark}}}}}{classes}"
    )


def _as_table(chart: LineChart | BarChart) -> DataTable:
    if isinstance(chart, BarChart):
        rows = [(label, *map(number, values)) for label, values in chart.rows]
        names = chart.parts if len(chart.parts) > 1 else (chart.x_label,)
        return DataTable(("", *names), rows, title=chart.title)
    places = sorted({x for series in chart.series for x, _ in series.points})
    stride = max(1, -(-len(places) // _MAX_COLUMNS))
    chosen = places[::-1][::stride][::-1]  # the last one is always among them
    rows = []
    for series in chart.series:
        found = dict(series.points)
        rows.append((series.label, *("-" if x not in found else number(found[x]) for x in chosen)))
    return DataTable((f"{chart.y_label} at {chart.x_label}", *map(number, chosen)), rows, title=chart.title)


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
