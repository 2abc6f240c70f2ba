"""Write the model of any step of a run, rebuilt from base weights and journal, as a Hugging Face directory.

python launch/export.py --run DIR --step best --out DIR [key=value ...]
"""

from __future__ import annotations

from pathlib import Path

from lezo_ds import command_line, distributed
from lezo_ds.runs.restore import export_run


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="directory of the run")
    parser.add_argument("--step", default="best", help="best (lowest validation loss), last, or a number")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="where model or data are now")
    arguments = parser.parse_intermixed_args()
    step = export_run(arguments.run, arguments.step, arguments.out, tuple(arguments.overrides))
    if distributed.rank() == 0:
        print(f"step {step} of {arguments.run}: {arguments.out}")


if __name__ == "__main__":
    command_line.run(main)
