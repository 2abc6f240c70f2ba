"""Plan how to run a recipe on given GPUs, without the weights of its model.

lezo-ds plan --config opt-30b-sst2-lezo --gpus 2 --gpu a100-40g
lezo-ds plan --config opt-30b-boolq-lezo --gpus 8 --gpu-memory 24

It prints the memory of each rank, the settings that fit, the traffic of a step, and the command that starts
the run. Only the model's configuration is needed.
"""

from __future__ import annotations

from lezo_ds import command_line
from lezo_ds.recipes import load_recipe
from lezo_ds.tools.arguments import positive

GPUS = {"a100-40g": 40, "a100-80g": 80, "h100": 80, "h200": 140, "rtx-4090": 24}
"""Memory of kinds of GPU in GiB."""


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser("plan", __doc__ or "")
    add = parser.add_argument
    add("--config", metavar="RECIPE", help="name of a recipe, or a YAML file, as for lezo-ds train")
    add("--gpus", type=positive, required=True, metavar="N", help="number of GPUs, with one rank on each")
    gpu = parser.add_mutually_exclusive_group(required=True)
    gpu.add_argument("--gpu", choices=GPUS, help="kind of GPU, which tells its memory")
    gpu.add_argument("--gpu-memory", type=positive, metavar="GIB", help="memory of each GPU in GiB")
    length_help = "tokens of the longest input (default: assumed from the task)"
    add("--length", type=positive, metavar="N", help=length_help)
    add("overrides", nargs="*", metavar="key=value", help=command_line.KEYS_HELP)
    arguments = command_line.parse_with_keys(parser)
    recipe = load_recipe(arguments.config, arguments.overrides)
    gigabytes = arguments.gpu_memory or GPUS[arguments.gpu]

    from lezo_ds.tools.planning.options import make_plan
    from lezo_ds.tools.planning.plan_text import plan_command, plan_text

    plan = make_plan(recipe, num_gpus=arguments.gpus, gpu_bytes=gigabytes * 2**30, length=arguments.length)
    print(plan_text(plan))
    print(f"{'command':15} {plan_command(plan, arguments.config, arguments.overrides)}")
