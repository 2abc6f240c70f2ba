"""Check everything on a GPU that a CPU cannot show, in one command.

lezo-ds gpu --out runs/gpu

It compares bits (the noise with plain PyTorch on the CPU; the engine with itself at other probes in a pass,
after a resumption and in a replay), and it measures steps against MeZO's published algorithm, launches, the
share of a step that the GPU waits for the host, the noise, and memory against the plan. It prints a table and
writes gpu.json. Each part runs in a process of its own, so that one which fails does not end the others. The
exit code is 1 if something failed or is not as it must be. Without a GPU, it checks the CPU, with a tiny
model.
"""

from __future__ import annotations

from pathlib import Path

from lezo_ds import command_line
from lezo_ds.tools.arguments import path, positive
from lezo_ds.tools.opt_shapes import SHAPES


def main() -> None:
    """Parse, check, run."""
    parser = command_line.parser("gpu", __doc__ or "")
    add = parser.add_argument
    shapes_help = "models whose steps are timed (default: opt-1.3b opt-13b; without a GPU, opt-tiny)"
    add("--shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help=shapes_help)
    add("--out", type=path, default=Path("runs/gpu"), metavar="DIR", help="where gpu.json goes")
    add("--minutes", type=positive, default=10, metavar="N", help="time for all parts together")
    add("--rounds", type=positive, default=5, metavar="N", help="timed steps or calls of each kind")
    arguments = parser.parse_args()

    from lezo_ds.tools.gpu_check.check import run_check

    run_check(arguments.shapes, arguments.out, minutes=arguments.minutes, rounds=arguments.rounds)
