"""Fine-tune a small OPT on made-up film reviews, after pre-training it here. `make demo` runs this."""

from __future__ import annotations

from pathlib import Path

from lezo_ds import command_line
from lezo_ds.tools.demo.command import demonstrate, report


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/demo"), help="where everything is written"
    )
    parser.add_argument("--num-seeds", type=int, choices=range(1, 10), default=3, help="seeds 0, 1, ...")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")
    arguments = parser.parse_intermixed_args()
    results = demonstrate(arguments.directory, range(arguments.num_seeds), arguments.overrides)
    print(f"\n{report(results)}")


if __name__ == "__main__":
    command_line.run(main)
