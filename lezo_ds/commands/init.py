"""Look at a model and a file of your own data, and write a commented recipe for them.

lezo-ds init MODEL DATA --out recipe.yaml
lezo-ds init models/smollm2 tickets.csv --label topic

DATA is a .csv, .tsv, .json, .jsonl or .parquet file, or OWNER/NAME:SPLIT on the hub. The recipe says in its
comments what was guessed, and why. No weights are loaded.
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
    parser.add_argument(
        "--label", metavar="FIELD", help="the field with the right answer, if the guess is wrong"
    )
    arguments = parser.parse_intermixed_args()

    from lezo_ds.tools.first_recipe.recipe import write_first_recipe

    written = write_first_recipe(arguments.model, arguments.data, arguments.out, label=arguments.label)
    print(f"{arguments.out}: {written.summary}")
    for heading, command in written.commands.items():
        print(f"{heading:8} {command}")
