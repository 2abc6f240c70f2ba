"""Compare methods on tasks, each at its best learning rate. See `launch/studies/smollm2.yaml`.

lezo-ds study STUDY.yaml --out DIR

The finished runs keep results and journals, but no weights, unless the study sets train.keep_snapshots.
The same command again skips finished runs and resumes the others. DIR/study.csv has a row for each task and
method. lezo-ds report shows the runs: lezo-ds report 'DIR/*/*/*' --html study.html
"""

from __future__ import annotations

import shlex
import sys

from lezo_ds import command_line
from lezo_ds.shipped import TRAIN, find_file
from lezo_ds.tools.arguments import path, path_or_name


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser("study", __doc__ or "")
    parser.add_argument(
        "study", type=path_or_name, metavar="STUDY", help="YAML file: launch/studies/smollm2.yaml"
    )
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="directory of the study")
    launcher_help = 'command that starts a run, such as "deepspeed --num_gpus 2"'
    parser.add_argument("--launcher", default=shlex.quote(sys.executable), help=launcher_help)
    arguments = parser.parse_args()

    from lezo_ds.tools.study import read_study, run_study

    launcher = [*shlex.split(arguments.launcher), str(TRAIN)]
    print(run_study(read_study(find_file(arguments.study)), arguments.out, launcher))
