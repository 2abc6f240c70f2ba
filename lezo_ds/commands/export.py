"""Write the model of any step of a run as a Hugging Face directory, or a run as one small file.

lezo-ds export --run DIR --step best --out DIR [key=value ...]
lezo-ds export --run DIR --journal FILE
lezo-ds export --journal FILE --step best --out DIR model.path=BASE_MODEL
"""

from __future__ import annotations

from lezo_ds import command_line
from lezo_ds.config import check_overrides
from lezo_ds.tools.arguments import path


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser("export", __doc__ or "")
    parser.add_argument("--run", type=path, metavar="DIR", help="directory of the run")
    journal_help = "with --run: write the run to this file; without: read the run from it"
    parser.add_argument("--journal", type=path, metavar="FILE", help=journal_help)
    parser.add_argument("--step", default="best", help="best (lowest validation loss), last, or a number")
    parser.add_argument("--out", type=path, metavar="DIR", help="directory to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=command_line.KEYS_HELP)
    arguments = command_line.parse_with_keys(parser)
    run, journal, out = arguments.run, arguments.journal, arguments.out
    if [run, journal, out].count(None) != 1:
        parser.error("give two of --run, --journal and --out")
    overrides = tuple(arguments.overrides)
    check_overrides(overrides)

    from lezo_ds import distributed
    from lezo_ds.runs.export import export_journal, export_run, write_journal

    if out is None:
        print(f"{run}: {journal}, {write_journal(run, journal):,} bytes")
        return
    step = (export_run if journal is None else export_journal)(run or journal, arguments.step, out, overrides)
    if distributed.rank() == 0:
        print(f"step {step} of {run or journal}: {out}")
