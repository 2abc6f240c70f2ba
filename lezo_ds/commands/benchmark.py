r"""Time variants of one step against each other, and the noise against a copy.

lezo-ds benchmark mezo_reference naive_zero3 ours:0 ours:0.75 --out results.csv

A variant is mezo_reference[:SPARSITY] (MeZO as published, in plain PyTorch), naive_zero3[:SPARSITY] (MeZO on
ZeRO-3 as one would first write it), ours[:SPARSITY[:PROBES_PER_PASS[:DIRECTIONS]]] (the papers' steps), or
recipe (the step that a recipe describes), each with [@LEARNING_RATE]. Times are compared in the same rounds
of the same run. Without --config, weights are random, and all examples have the same length. Further commands
append their rows to the same table:

deepspeed --num_gpus 2 --module lezo_ds benchmark --task boolq mezo_reference ours:0 --out results.csv

On the model and the sentences of a recipe, and then until its training has got good:

lezo-ds benchmark --config launch/recipes/demo.yaml mezo_reference ours:0 ours:0.75
lezo-ds benchmark --config launch/recipes/demo.yaml --until-loss 0.6 train.eval_every=10 \
    mezo_reference ours:0.75

On a GPU, with the noise against a copy, and replay:

lezo-ds benchmark --shape opt-13b --task squad --dtype bf16 --update-precision stochastic \
    --noise 268435456 --replay --rounds 20 mezo_reference ours:0 ours:0.75 --out results.csv

What a step costs the host (Python calls, messages, launches, CPU time), without a GPU or a second rank:

lezo-ds benchmark --host --out host.json
"""

from __future__ import annotations

from lezo_ds import command_line
from lezo_ds.tools.arguments import path, positive
from lezo_ds.tools.benchmark.settings import add_arguments, read_job

UNTIL_HELP = "train with each variant until the validation loss is at most LOSS, or for train.steps"


def main() -> None:
    """Parse, check, run."""
    parser = command_line.parser("benchmark", __doc__ or "")
    add = parser.add_argument
    add_arguments(parser)
    add("--rounds", type=positive, default=5, metavar="N", help="timed steps of each variant")
    add("--until-loss", type=float, metavar="LOSS", help=UNTIL_HELP)
    add("--threads", type=positive, default=1, metavar="N", help="CPU threads per rank")
    add("--replay", action="store_true", help="also replay the timed steps of our variants")
    add("--noise", type=positive, metavar="N", help="also time the noise on N weights")
    add("--host", action="store_true", help="count what a step costs the host, and nothing else")
    add(
        "--out",
        type=path,
        metavar="FILE",
        help="append the results to this CSV; with --host, write this JSON",
    )
    arguments = command_line.parse_with_keys(parser)
    job = read_job(arguments)
    from lezo_ds.tools.benchmark.command import run  # torch and DeepSpeed take seconds to import

    run(arguments, job)
