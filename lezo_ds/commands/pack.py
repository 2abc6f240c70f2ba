"""Pack a LeZO or MeZO run into one small file without weights. lezo-ds export --pack restores its model.

lezo-ds pack --run DIR --out run.tar.gz
"""

from __future__ import annotations

from lezo_ds import command_line
from lezo_ds.tools.arguments import path


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser("pack", __doc__ or "")
    parser.add_argument("--run", type=path, required=True, metavar="DIR", help="directory of the run")
    parser.add_argument("--out", type=path, required=True, metavar="FILE", help="file to write")
    arguments = parser.parse_args()

    from lezo_ds.runs.pack import pack_run

    size = pack_run(arguments.run, arguments.out)
    print(f"{arguments.run}: {arguments.out}, {size:,} bytes")
