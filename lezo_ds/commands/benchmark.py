"""Time variants of one step against each other.

lezo-ds benchmark mezo_reference naive_zero3 ours:0 ours:0.75 --out results.csv
lezo-ds benchmark --config launch/recipes/demo.yaml mezo_reference ours:0 ours:0.75

A variant is mezo_reference[:SPARSITY] (MeZO as published, in plain PyTorch), naive_zero3[:SPARSITY] (MeZO on
ZeRO-3 as one would first write it), ours[:SPARSITY[:PROBES_PER_PASS[:DIRECTIONS]]] (the papers' steps), or
recipe (the step that a recipe describes), each with [@LEARNING_RATE]. Times are compared in the same rounds
of the same run. Without --config, weights are random, and all examples have the same length.
"""

from __future__ import annotations

from lezo_ds import command_line
from lezo_ds.tools.arguments import path, positive
from lezo_ds.tools.benchmark.settings import add_arguments, read_job


def main() -> None:
    """Parse, check, run."""
    parser = command_line.parser("benchmark", __doc__ or "")
    add = parser.add_argument
    add_arguments(parser)
    add("--rounds", type=positive, default=5, metavar="N", help="timed steps of each variant")
    add("--threads", type=positive, default=1, metavar="N", help="CPU threads per rank")
    add("--replay", action="store_true", help="also replay the timed steps of our variants")
    add("--out", type=path, metavar="FILE", help="append the results to this CSV")
    arguments = command_line.parse_with_keys(parser)
    job = read_job(arguments)
    from lezo_ds.tools.benchmark.command import run  # torch and DeepSpeed take seconds to import

    run(arguments, job)
