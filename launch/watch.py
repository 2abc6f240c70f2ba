"""Follow a run: a line for each step and evaluation, until it ends: python launch/watch.py RUN."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lezo_ds import command_line
from lezo_ds.runs.metrics import follow


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of the run")
    parser.add_argument("--once", action="store_true", help="say where it stands, and end")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        for line in follow(arguments.run, 0.0 if arguments.once else max(0.1, arguments.every)):
            print(line, flush=True)


if __name__ == "__main__":
    command_line.run(main)
