"""Write the model of any step of a run as a Hugging Face directory.

lezo-ds export --run DIR --step best --out DIR [key=value ...]
lezo-ds export --pack FILE --step best --out DIR model.path=BASE_MODEL
lezo-ds export --run DIR --out DIR --push-to-hub OWNER/NAME --private
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
    push_help = "upload what was written to this repository (with a pack, the pack too)"
    parser.add_argument("--push-to-hub", metavar="OWNER/NAME", help=push_help)
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=command_line.KEYS_HELP)
    arguments = command_line.parse_with_keys(parser)
    if arguments.private and arguments.push_to_hub is None:
        parser.error("--private needs --push-to-hub")
    overrides = tuple(arguments.overrides)
    check_overrides(overrides)

    from lezo_ds import distributed
    from lezo_ds.runs.export import export_pack, export_run
    from lezo_ds.runs.hub import check_hub, files_to_upload, push_to_hub

    if arguments.push_to_hub is not None:
        check_hub(arguments.push_to_hub)
    if arguments.run is not None:
        step = export_run(arguments.run, arguments.step, arguments.out, overrides=overrides)
    else:
        step = export_pack(arguments.pack, arguments.step, arguments.out, overrides=overrides)
    if distributed.rank() != 0:
        return
    print(f"step {step} of {arguments.run or arguments.pack}: {arguments.out}")
    if arguments.push_to_hub is not None:
        files = files_to_upload(arguments.out, arguments.pack)
        print(push_to_hub(arguments.push_to_hub, files, private=arguments.private, message=f"step {step}"))
