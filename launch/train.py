"""Fine-tune a model: deepspeed launch/train.py --config launch/recipes/NAME.yaml key=value ..."""

from __future__ import annotations

import json
from pathlib import Path

from lezo_ds import command_line, distributed
from lezo_ds.config import describe, load_config
from lezo_ds.runs.trainer import train
from lezo_ds.tools.planning.dry_run import describe_plan


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(f"{__doc__}\n\nKeys:\n{describe()}")
    parser.add_argument("--config", type=Path, help="recipe (YAML)")
    parser.add_argument(
        "--dry-run", action="store_true", help="check all that needs no weights, print the plan"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the recipe")
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    if arguments.dry_run:
        distributed.init_distributed()  # the plan depends on the number of ranks
        plan = describe_plan(config, distributed.world_size())
        if distributed.rank() == 0:
            print(plan)
        return
    results = train(config)
    if distributed.rank() == 0:
        print(json.dumps({"run_dir": config.run_dir, **results}, indent=1))


if __name__ == "__main__":
    command_line.run(main)
