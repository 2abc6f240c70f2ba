"""Say how to run a model on given GPUs, before any weights are there.

python launch/plan.py opt-30b --gpus 2 --gpu a100-40g --task sst2
python launch/plan.py facebook/opt-13b --gpus 8 --gpu-memory 24 --task boolq --offload

From the model's config alone: the memory of each rank, which settings fit, what crosses the network, an
estimate of the time, and the command. Start it in the root of the repository.
"""

from __future__ import annotations

from lezo_ds import command_line
from lezo_ds.tools.planning.arguments import add_request, read_request, read_speeds
from lezo_ds.tools.planning.plan import make_plan
from lezo_ds.tools.planning.text import plan_text


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(__doc__ or "")
    add_request(parser)
    arguments = parser.parse_args()
    print(plan_text(make_plan(read_request(arguments)), read_speeds(arguments)))


if __name__ == "__main__":
    command_line.run(main)
