"""Look at a model and a file of your own data, and write a commented recipe for them.

lezo-ds init MODEL DATA --out recipe.yaml
lezo-ds init models/smollm2 tickets.csv --text body --label topic

DATA is a .csv, .tsv, .json, .jsonl or .parquet file, or OWNER/NAME:SPLIT on the hub. Without --text, the only
column of texts is read; without --label, the only column with few different values is learned.
"""

from __future__ import annotations

from pathlib import Path

from lezo_ds import command_line
from lezo_ds.tools.arguments import path, path_or_name


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser("init", __doc__ or "")
    parser.add_argument(
        "model", type=path_or_name, metavar="MODEL", help="directory of a model, or its hub id"
    )
    parser.add_argument(
        "data", type=path_or_name, metavar="DATA", help="file of records, or a split on the hub"
    )
    out_help = "recipe to write (default: recipe.yaml)"
    parser.add_argument("--out", type=path, default=Path("recipe.yaml"), metavar="FILE", help=out_help)
    parser.add_argument("--text", metavar="COLUMN", help="the column that the model reads")
    parser.add_argument("--label", metavar="COLUMN", help="the column with the gold label or text")
    arguments = parser.parse_intermixed_args()

    from lezo_ds.tools.init import main as run

    run(arguments)
