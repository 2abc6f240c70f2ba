"""Fine-tune a real language model on real film reviews, on two CPU ranks. `make demo` runs this script."""

from __future__ import annotations

from pathlib import Path

from lezo_ds import command_line
from lezo_ds.config import check_overrides
from lezo_ds.tools.arguments import path


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser("demo", __doc__ or "")
    parser.add_argument(
        "--directory", type=path, help="directory of all output (default: runs/demo, or runs/demo-offline)"
    )
    parser.add_argument("--num-seeds", type=int, choices=range(1, 10), help="number of runs")
    parser.add_argument(
        "--offline", action="store_true", help="make up the reviews and the model: nothing is fetched"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=command_line.KEYS_HELP)
    arguments = command_line.parse_with_keys(parser)
    check_overrides(arguments.overrides)

    from lezo_ds.tools.demo.command import demonstrate

    text = demonstrate(
        directory=arguments.directory or Path("runs/demo-offline" if arguments.offline else "runs/demo"),
        num_seeds=arguments.num_seeds,
        overrides=arguments.overrides,
        offline=arguments.offline,
    )
    print(f"\n{text}")
