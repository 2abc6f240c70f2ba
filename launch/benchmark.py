r"""Measure the time of a training step in several variants, and of the noise, on random weights.

python launch/benchmark.py --task sst2,boolq mezo_reference naive_zero3 ours:0 ours:0.75 --out results.csv

A variant is mezo_reference[:SPARSITY] (MeZO as published, in plain PyTorch), mezo_fused[:SPARSITY] (the same
with fewer operations), naive_zero3[:SPARSITY] (a straightforward MeZO on ZeRO-3) or
ours[:SPARSITY[:PROBES_PER_PASS[:DIRECTIONS]]]. The variants take turns in each round, so their times compare.

This command measures everything on one GPU: three models (30b needs 128 GB), three tasks, noise and replay:

python launch/benchmark.py --shape opt-1.3b,opt-13b,opt-30b --task sst2,boolq,squad --dtype bf16 \
    --update-precision stochastic --noise 268435456 --replay --rounds 20 \
    mezo_reference ours:0 ours:0.75 --out results.csv

These commands show how the time of a step grows with one setting. The number of ranks can vary, too:

deepspeed --num_gpus 2 launch/benchmark.py --length 8,32,64,128,256 ours:0 ours:0.5 ours:1 --out results.csv
deepspeed --num_gpus 2 launch/benchmark.py --layers 2,4,8 ours:0 ours:0.5 ours:1 --out results.csv
deepspeed --num_gpus 2 launch/benchmark.py --micro-batches 2,4,8 ours:0 ours:0.5 ours:1 --out results.csv
"""

from __future__ import annotations

from pathlib import Path

from lezo_ds import command_line
from lezo_ds.errors import UserError
from lezo_ds.tools.benchmark.settings import Variant, add_arguments, positive, read_settings


def main() -> None:
    """Parse, check, run."""
    parser = command_line.parser(__doc__ or "")
    add = parser.add_argument
    add("variants", nargs="*", metavar="VARIANT", help="variant to measure; ratios are relative to the first")
    add_arguments(parser)
    add("--rounds", type=positive, default=5, metavar="N", help="timed steps of each variant")
    add("--threads", type=positive, default=1, metavar="N", help="CPU threads per rank")
    add("--replay", action="store_true", help="also replay the timed steps of our variants")
    add("--noise", type=positive, metavar="N", help="also measure the noise on N weights")
    add("--out", type=Path, metavar="FILE.csv", help="append the results to this table")
    arguments = parser.parse_intermixed_args()
    settings, variants = read_settings(arguments), [Variant.parse(text) for text in arguments.variants]
    if not variants and not arguments.noise:
        raise UserError(
            "nothing to measure",
            got="no variant and no --noise",
            expected="variants, --noise or both",
            fix="for example mezo_reference ours:0 ours:0.75",
        )
    from lezo_ds.tools.benchmark.command import run  # torch and DeepSpeed take seconds to import

    run(arguments, settings, variants)


if __name__ == "__main__":
    command_line.run(main)
