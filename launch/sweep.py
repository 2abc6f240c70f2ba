r"""Do every run of a grid, one after the other, and compare them over seeds.

python launch/sweep.py --config launch/recipes/NAME.yaml --out runs/NAME-sweep \
    --grid zo.learning_rate=1e-6,7e-7 zo.sparsity=0.5,0.75 seed,data.seed=0,1,2,3,4

What is done is skipped, what was begun continues. results.csv (a line a run) and summary.csv (mean and
deviation over seeds; the lowest validation loss is best) are written to DIR. Keys with commas between
them change together. Changes to the recipe for all runs, key=value, stand before --grid.
launch/slurm/sweep.sbatch does the same as a Slurm array.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from lezo_ds import command_line
from lezo_ds.tools.sweep import listing, plan_sweep, run_sweep, select_run, table, write_tables


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument("--config", type=Path, required=True, help="recipe (YAML) that all runs share")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the sweep")
    parser.add_argument(
        "--grid", nargs="+", required=True, metavar="KEY=VALUE,...", help="keys, each with its values"
    )
    parser.add_argument(
        "--launcher", default=shlex.quote(sys.executable), help='what starts a run: "deepspeed --num_gpus 2"'
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--index", type=int, metavar="N", help="do this run only, and write no table")
    one.add_argument("--list", action="store_true", help="do none: list the runs, write the tables")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")
    arguments = parser.parse_intermixed_args()
    runs = plan_sweep(arguments.config, arguments.grid, arguments.out, arguments.overrides)
    launcher = [*shlex.split(arguments.launcher), str(Path(__file__).with_name("train.py"))]
    if arguments.index is not None:
        run_sweep([select_run(runs, arguments.index)], launcher)
        return
    try:
        if arguments.list:
            print(listing(runs))
        else:
            run_sweep(runs, launcher)
    finally:
        write_tables(runs, arguments.out)
        print(table(runs))


if __name__ == "__main__":
    command_line.run(main)
