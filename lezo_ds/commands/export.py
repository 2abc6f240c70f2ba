"""Write the model of any step of a run as a Hugging Face directory.

lezo-ds export --run DIR --step best --out DIR [key=value ...]
lezo-ds export --pack FILE --step best --out DIR model.path=BASE_MODEL
"""

from __future__ import annotations

from lezo_ds import command_line
from lezo_ds.config import check_overrides
from lezo_ds.tools.arguments import path


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser("export", __doc__ or "")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=path, metavar="DIR", help="directory of the run")
    source.add_argument("--pack", type=path, metavar="FILE", help="a run that lezo-ds pack packed")
    parser.add_argument("--step", default="best", help="best (lowest validation loss), last, or a number")
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="directory to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=command_line.KEYS_HELP)
    arguments = command_line.parse_with_keys(parser)
    overrides = tuple(arguments.overrides)
    check_overrides(overrides)

    from lezo_ds import distributed
    from lezo_ds.runs.export import export_pack, export_run

    if arguments.run is not None:
        step = export_run(arguments.run, arguments.step, arguments.out, overrides=overrides)
    else:
        step = export_pack(arguments.pack, arguments.step, arguments.out, overrides=overrides)
    if distributed.rank() == 0:
        print(f"step {step} of {arguments.run or arguments.pack}: {arguments.out}")
