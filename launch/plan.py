"""Plan how to run a recipe on given GPUs, without the weights of its model.

python launch/plan.py --config opt-30b-sst2-lezo --gpus 2 --gpu a100-40g
python launch/plan.py --config opt-30b-boolq-lezo --gpus 8 --gpu-memory 24

It prints the memory of each rank, the settings that fit, the traffic of a step, an estimate of its time, and
the command that starts the run. Only the model's configuration is needed. Run it in the root of the
repository.
"""

from __future__ import annotations

from lezo_ds import command_line
from lezo_ds.recipes import load_recipe
from lezo_ds.tools.planning.arguments import add_arguments, gpu_bytes, hardware_speeds, reserve_bytes


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(__doc__ or "")
    add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    recipe, memory = load_recipe(arguments.config, arguments.overrides), gpu_bytes(arguments)

    from lezo_ds.tools.planning.options import make_plan
    from lezo_ds.tools.planning.plan_text import plan_command, plan_text

    plan = make_plan(
        recipe,
        num_gpus=arguments.gpus,
        gpu_bytes=memory,
        length=arguments.length,
        reserve=reserve_bytes(arguments),
    )
    print(plan_text(plan, hardware_speeds(arguments)))
    print(f"{'command':15} {plan_command(plan, arguments.config, arguments.overrides)}")


if __name__ == "__main__":
    command_line.run_main(main)
