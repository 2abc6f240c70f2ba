"""Write launch/recipes/opt-*.yaml, one for each cell of the paper's tables (lezo_ds/recipes/paper.py)."""

from __future__ import annotations

from pathlib import Path

from lezo_ds import command_line
from lezo_ds.recipes.registry import RECIPES, write_recipes


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument("--directory", type=Path, default=RECIPES, help="where they go")
    directory = parser.parse_args().directory
    print(f"{write_recipes(directory)} recipes in {directory}")


if __name__ == "__main__":
    command_line.run(main)
