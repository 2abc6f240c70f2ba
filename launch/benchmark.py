r"""Time variants of one step against each other, and the kernels of the noise, on random weights.

python launch/benchmark.py --task sst2,boolq mezo_reference naive_zero3 ours:0 ours:0.75 --out results/cpu

All of a GPU at once: three models (30b needs 128 GB), three tasks, the noise against a copy, and replay:

python launch/benchmark.py --shape opt-1.3b,opt-13b,opt-30b --task sst2,boolq,squad --dtype bf16 \
    --update-precision stochastic --noise 268435456 --replay 20 --rounds 10 \
    mezo_reference ours:0 ours:0.75 --out results/gpu

How a step grows, on 1, 2 and 4 ranks; launch/benchmark_report.py puts the results together:

deepspeed --num_gpus 2 launch/benchmark.py --one-at-a-time --length 32,8,64,128,256 --layers 4,2,8 \
    --micro-batches 4,8,16 ours:0 ours:0.25 ours:0.5 ours:0.75 ours:1 --out results/growth-2
"""

from __future__ import annotations

from pathlib import Path

from lezo_ds import command_line, distributed
from lezo_ds.tools.benchmark.arguments import add_settings, positive, read_settings
from lezo_ds.tools.benchmark.kernels import measure_kernels
from lezo_ds.tools.benchmark.report import draw, machine_facts, save
from lezo_ds.tools.benchmark.results import Results
from lezo_ds.tools.benchmark.steps import measure_steps
from lezo_ds.tools.benchmark.variants import VariantName


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument("variants", nargs="*", metavar="NAME[:SPARSITY[:FORWARD[:DIRECTIONS]]]")
    add_settings(parser)
    parser.add_argument("--replay", type=int, default=0, metavar="N", help="time a replay of N steps, too")
    parser.add_argument("--noise", type=positive, metavar="N", help="time the noise on N elements, too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write FILE.json, FILE.md and pictures")
    arguments = parser.parse_intermixed_args()
    settings, names = read_settings(arguments), [VariantName.parse(name) for name in arguments.variants]
    results = Results(machine_facts())
    if arguments.noise:
        kernels = measure_kernels(arguments.dtype, arguments.noise, arguments.rounds, arguments.threads)
        results = results.with_kernels(kernels)
    for cell in measure_steps(settings if names else [], names, arguments.replay):
        results = results.with_cell(cell)
        if arguments.out is not None:
            save(results, arguments.out)  # as far as it is, should it not get to the end
    save(results, arguments.out)
    if arguments.out is not None and distributed.rank() == 0:
        draw([results], arguments.out)


if __name__ == "__main__":
    command_line.run(main)
