r"""Run every combination of a grid, one after the other, and compare the settings over seeds.

lezo-ds sweep --config opt-13b-sst2-lezo --out runs/sweep \
    --grid zo.learning_rate=1e-6,7e-7 zo.sparsity=0.5,0.75 seed,data.seed=0,1,2,3,4

The same command again skips finished runs and resumes the others. It writes results.csv (a row for each run)
and summary.csv (mean and deviation over seeds; the lowest validation loss is best) to DIR. Keys that are
separated by commas change together. A finished run of lezo or mezo keeps no weights, since its journal gives
them back: train.keep_snapshots=2 keeps two snapshots. --key value, or key=value before --grid, changes the
recipe for all runs. launch/slurm/sweep.sbatch runs a sweep as a Slurm array.
"""

from __future__ import annotations

import shlex
import sys

from lezo_ds import command_line
from lezo_ds.shipped import TRAIN
from lezo_ds.tools.arguments import path


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser("sweep", __doc__ or "")
    add = parser.add_argument
    add("--config", required=True, metavar="RECIPE", help="name of a recipe, or a YAML file, for all runs")
    add("--out", type=path, required=True, metavar="DIR", help="directory of the sweep")
    add("--grid", nargs="+", required=True, metavar="KEY=VALUE,...", help="a key and its values")
    launcher_help = 'command that starts a run, such as "deepspeed --num_gpus 2"'
    add("--launcher", default=shlex.quote(sys.executable), help=launcher_help)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--index", type=int, metavar="N", help="start only this run, and write no table")
    one.add_argument("--list", action="store_true", help="only list the runs and write the tables")
    add("overrides", nargs="*", metavar="key=value", help=command_line.KEYS_HELP)
    arguments = command_line.parse_with_keys(parser)

    from lezo_ds.tools.sweep import listing, plan_sweep, run_sweep, select_run, write_tables

    runs = plan_sweep(arguments.config, arguments.grid, arguments.out, overrides=arguments.overrides)
    launcher = [*shlex.split(arguments.launcher), str(TRAIN)]
    if arguments.index is not None:
        run_sweep([select_run(runs, arguments.index)], launcher)
        return
    try:
        if arguments.list:
            print(listing(runs))
        else:
            run_sweep(runs, launcher)
    finally:
        print(write_tables(runs, arguments.out))
