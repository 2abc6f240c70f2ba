"""Fine-tune a model: deepspeed --module lezo_ds train --config RECIPE key=value ...

RECIPE is a name, such as opt-13b-sst2-lezo, or a YAML file. The same command resumes a run that was stopped.

In paths, ~ and $VAR are expanded. A path in a YAML file is taken from the folder of that file if it begins
with ./ or ../ or, except for run_dir, if it exists there. Any other is taken from the working directory.
"""

from __future__ import annotations

import json

from lezo_ds import command_line
from lezo_ds.config import describe
from lezo_ds.recipes import list_recipes, load_recipe, recipe_text
from lezo_ds.tools.arguments import positive


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser("train", f"{__doc__}\nKeys:\n{describe()}")
    add = parser.add_argument
    add("--config", metavar="RECIPE", help="name of a recipe, or a YAML file")
    add("--dry-run", action="store_true", help="check everything but the weights, and print the memory")
    add("--gpus", type=positive, metavar="N", help="with --dry-run: for this number of GPUs")
    add("--gpu-memory", type=float, metavar="GIB", help="with --dry-run: what fits on such GPUs")
    add("--print-config", action="store_true", help="print the whole configuration as a YAML recipe")
    add("--list-recipes", action="store_true", help="print the names of all recipes")
    add("--json", action="store_true", help="print the results as JSON instead of a summary")
    add("overrides", nargs="*", metavar="key=value", help=command_line.KEYS_HELP)
    arguments = command_line.parse_with_keys(parser)
    if arguments.list_recipes:
        print(list_recipes())
        return
    config = load_recipe(arguments.config, arguments.overrides)
    if arguments.print_config:
        print(recipe_text(arguments.config, arguments.overrides), end="")
        return

    from lezo_ds import distributed
    from lezo_ds.runs.screen import run_summary
    from lezo_ds.runs.trainer import train
    from lezo_ds.tools.dry_run import dry_run

    if arguments.dry_run:
        distributed.init_distributed()  # the plan depends on the number of ranks
        plan = dry_run(config, arguments.gpus, arguments.gpu_memory)
        if distributed.rank() == 0:
            print(plan)
        return
    results = train(config)
    if distributed.rank() == 0:
        shown = {"run_dir": config.run_dir, **results}
        print(json.dumps(shown, indent=1) if arguments.json else run_summary(config.run_dir, results))
