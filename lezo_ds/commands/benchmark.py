"""Time variants of one step against each other.

lezo-ds benchmark mezo_reference naive_zero3 ours:0 ours:0.75 --out results.csv
lezo-ds benchmark --config launch/recipes/demo.yaml mezo_reference ours:0 ours:0.75

A variant is mezo_reference (MeZO as published, in plain PyTorch), naive_zero3 (MeZO on ZeRO-3 as one would
first write it), ours (the papers' step), each with [:SPARSITY], or recipe (the step that a recipe describes).
Ratios are relative to the first variant. Without --config, weights are random, and all examples have the same
length: that of a typical example of the task.
"""

from __future__ import annotations

from typing import get_args

from lezo_ds import command_line
from lezo_ds.config import Dtype
from lezo_ds.tools.arguments import path, positive
from lezo_ds.zo.updates import UpdatePrecision


def main() -> None:
    """Parse and run."""
    parser = command_line.parser("benchmark", __doc__ or "")
    add = parser.add_argument
    add("variants", nargs="+", metavar="VARIANT", help="a variant, or key=value for a key of the recipe")
    add("--config", metavar="RECIPE", help="measure the model and the batches of this recipe")
    add("--rounds", type=positive, default=5, metavar="N", help="timed steps of each variant (default: 5)")
    add("--out", type=path, metavar="FILE", help="append the results to this CSV")
    add = parser.add_argument_group("random inputs, without --config").add_argument
    add("--shape", default="opt-125m", help="size of the model: opt-tiny, opt-125m ... opt-66b")
    add("--layers", type=positive, metavar="N", help="number of blocks (default: the shape's)")
    add("--task", choices=("sst2", "boolq"), default="sst2", help="32 or 200 tokens an example")
    add("--batch", type=positive, default=16, metavar="N", help="examples per step (default: 16)")
    add("--dtype", choices=get_args(Dtype), default="fp32", help="of the weights (default: fp32)")
    add("--update-precision", choices=get_args(UpdatePrecision), default="fp32_master")
    add("--partition-size", type=positive, metavar="N", help="number of ranks that share the weights")
    arguments = command_line.parse_with_keys(parser)

    from lezo_ds.tools.benchmark import main as run  # torch and DeepSpeed take seconds to import

    run(arguments)
