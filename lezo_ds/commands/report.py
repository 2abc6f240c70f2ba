"""Print the results of runs in the layout of the paper's tables, or write a page with tables and figures.

lezo-ds report RUN...
lezo-ds report RUN... --benchmark FILE.csv --html page.html
"""

from __future__ import annotations

from lezo_ds import command_line
from lezo_ds.tools.arguments import path, path_or_name


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser("report", __doc__ or "")
    parser.add_argument(
        "runs", nargs="*", type=path_or_name, metavar="RUN", help="directory of a run, or a pattern: 'runs/*'"
    )
    parser.add_argument("--html", type=path, metavar="FILE", help="write a page instead of a table")
    parser.add_argument("--benchmark", type=path, metavar="FILE", help="show this CSV of lezo-ds benchmark")
    arguments = parser.parse_intermixed_args()
    # Importing pandas takes seconds, which neither --help nor a typo should wait for.
    from lezo_ds.files import failures_named, write_atomically
    from lezo_ds.tools.reports.report import make_page, make_table

    if arguments.html is None:
        print(make_table(arguments.runs), end="")
        return
    page = make_page(arguments.runs, arguments.benchmark)
    with failures_named(arguments.html):
        write_atomically(arguments.html, page)
