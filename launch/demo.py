"""Pre-train a small OPT and fine-tune it on generated film reviews. `make demo` runs this script."""

from __future__ import annotations

from pathlib import Path

from lezo_ds import command_line
from lezo_ds.config import check_overrides


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument("--directory", type=Path, default=Path("runs/demo"), help="directory of all output")
    parser.add_argument("--num-seeds", type=int, choices=range(1, 10), default=3, help="number of runs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change a key of the recipe")
    arguments = parser.parse_intermixed_args()
    check_overrides(arguments.overrides)

    from lezo_ds.tools.demo.command import demonstrate, report

    results = demonstrate(arguments.directory, range(arguments.num_seeds), arguments.overrides)
    print(f"\n{report(results)}")


if __name__ == "__main__":
    command_line.run(main)
