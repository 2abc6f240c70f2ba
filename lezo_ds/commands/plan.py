"""Plan how to run a recipe on given GPUs, without the weights of its model.

lezo-ds plan --config opt-30b-sst2-lezo --gpus 2 --gpu a100-40g
lezo-ds plan --config opt-30b-boolq-lezo --gpus 8 --gpu-memory 24
lezo-ds plan --config opt-30b-boolq-lezo --gpus 16 --gpu h100 --node-link 50 model.path=opt-175b

It prints the memory of each rank, the settings that fit, the traffic of a step, an estimate of its time with
all that it assumes, and the command that starts the run. Only the model's configuration is needed. Those of
OPT, Llama and Qwen models are known.
"""

from __future__ import annotations

from lezo_ds import command_line
from lezo_ds.recipes import load_recipe
from lezo_ds.tools.arguments import positive
from lezo_ds.tools.planning.hardware import GPUS, Cluster


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser("plan", __doc__ or "")
    add = parser.add_argument
    add("--config", metavar="RECIPE", help="name of a recipe, or a YAML file, as for lezo-ds train")
    add("--gpus", type=positive, required=True, metavar="N", help="number of GPUs, with one rank on each")
    gpu = parser.add_mutually_exclusive_group(required=True)
    gpu.add_argument("--gpu", choices=GPUS, help="kind of GPU, which tells its memory and speed")
    gpu.add_argument("--gpu-memory", type=positive, metavar="GIB", help="memory of each GPU in GiB")
    add("--gpus-per-node", type=positive, metavar="N", help="GPUs of a node (default: 8, or all if fewer)")
    add("--link", type=positive, metavar="GB/S", help="speed between GPUs of a node (default: of the kind)")
    add(
        "--node-link",
        type=positive,
        metavar="GB/S",
        help="speed of a GPU's link to other nodes (default: 25)",
    )
    length_help = "tokens of the longest input (default: assumed from the task)"
    add("--length", type=positive, metavar="N", help=length_help)
    add("overrides", nargs="*", metavar="key=value", help=command_line.KEYS_HELP)
    arguments = command_line.parse_with_keys(parser)
    recipe = load_recipe(arguments.config, arguments.overrides)
    kind = GPUS.get(arguments.gpu)
    gigabytes = arguments.gpu_memory if kind is None else kind.gigabytes
    cluster = Cluster(kind, arguments.gpus_per_node, arguments.link, arguments.node_link)

    from lezo_ds.tools.planning.options import make_plan
    from lezo_ds.tools.planning.plan_text import plan_command, plan_text

    memory = gigabytes * 2**30
    plan = make_plan(
        recipe, num_gpus=arguments.gpus, gpu_bytes=memory, length=arguments.length, cluster=cluster
    )
    print(plan_text(plan))
    print(f"{'command':15} {plan_command(plan, arguments.config, arguments.overrides)}")
