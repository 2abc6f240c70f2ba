"""Print the results of runs in the layout of the paper's tables, or write one page of all there is to see.

python launch/report.py RUN...
python launch/report.py RUN... --benchmark FILE.json --html page.html
"""

from __future__ import annotations

import logging
from pathlib import Path

from lezo_ds import command_line
from lezo_ds.tools.reports import page
from lezo_ds.tools.reports.tables import find_runs, read_report, to_csv, to_markdown, write_report

FORMATS = {"markdown": to_markdown, "csv": to_csv}


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="directory of a run, or a pattern: 'runs/*'")
    parser.add_argument("--format", choices=FORMATS, default="markdown", help="of the table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there, and do not print it")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, and print no table")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the same page as Markdown")
    parser.add_argument(
        "--benchmark", type=Path, nargs="+", default=[], metavar="FILE", help="of launch/benchmark.py"
    )
    arguments = parser.parse_intermixed_args()
    paths = find_runs(arguments.runs)
    for file, render in ((arguments.html, page.to_html), (arguments.page, page.to_markdown)):
        if file is not None:
            write_report(file, render(page.make_page(paths, arguments.benchmark)))
    if arguments.html or arguments.page:
        return
    report = read_report(paths)
    text = FORMATS[arguments.format](report)
    if arguments.out is not None:
        write_report(arguments.out, text)
    else:
        print(text, end="")
    if arguments.out is not None or arguments.format == "csv":
        for warning in report.warnings:
            logging.warning("warning: %s", warning)


if __name__ == "__main__":
    command_line.run(main)
