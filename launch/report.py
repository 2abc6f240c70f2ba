"""Print the results of runs in the layout of the paper's tables, or write a page with tables and figures.

python launch/report.py RUN...
python launch/report.py RUN... --benchmark FILE.csv --html page.html
"""

from __future__ import annotations

from pathlib import Path

from lezo_ds import command_line


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(__doc__ or "")
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="directory of a run, or a pattern such as 'runs/*'")
    add("--format", choices=["markdown", "csv"], default="markdown", help="format of the table")
    add("--out", type=Path, metavar="FILE", help="write the table to this file instead of printing it")
    add("--html", type=Path, metavar="FILE", help="write a page instead of a table")
    add("--benchmark", type=Path, metavar="FILE", help="CSV of launch/benchmark.py to show on the page")
    arguments = parser.parse_intermixed_args()
    # pandas takes seconds to import. --help and a wrong argument should not wait for it.
    from lezo_ds.files import failures_named, write_atomically
    from lezo_ds.tools.reports.report import make_page, make_table

    if arguments.html is not None:
        text, file = make_page(arguments.runs, arguments.benchmark), arguments.html
    else:
        text, file = make_table(arguments.runs, arguments.format), arguments.out
    if file is None:
        print(text, end="")
        return
    with failures_named(file):
        write_atomically(file, text)


if __name__ == "__main__":
    command_line.run(main)
