"""What a benchmark measures: variants of a step, under the setting that the command line gives."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import get_args

from lezo_ds.config import Dtype
from lezo_ds.errors import UserError
from lezo_ds.tools.arguments import positive
from lezo_ds.tools.opt_shapes import MAX_LENGTH, SHAPES
from lezo_ds.tools.workloads import Workload, typical_workload
from lezo_ds.zo.precision import UpdatePrecision

KINDS = ("mezo_reference", "naive_zero3", "ours")


@dataclass(frozen=True)
class Variant:
    """One way to do a training step.

    Attributes:
        text: as on the command line: KIND[:SPARSITY[:PROBES_PER_PASS[:DIRECTIONS]]], the last two for
            "ours" only.
        kind: one of KINDS.
        sparsity: share of the blocks that a step drops, 0 to 1; 0 is MeZO.
        probes_per_pass: perturbed copies of the batch in a forward pass, at least 1.
        directions: directions per step, at least 1.
    """

    text: str
    kind: str
    sparsity: float = 0.0
    probes_per_pass: int = 2
    directions: int = 1

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read a variant.

        >>> Variant.parse("ours:0.75:1")
        Variant(text='ours:0.75:1', kind='ours', sparsity=0.75, probes_per_pass=1, directions=1)

        Raises:
            UserError: there is no such variant.
        """
        kind, *numbers = text.split(":")
        try:
            sparsity = float(numbers[0]) if numbers else 0.0
            probes_per_pass = int(numbers[1]) if len(numbers) > 1 else 2
            directions = int(numbers[2]) if len(numbers) > 2 else 1
        except ValueError:
            raise _unknown(text) from None
        known = kind in KINDS and len(numbers) <= (3 if kind == "ours" else 1)
        if not known or not 0 <= sparsity <= 1 or min(probes_per_pass, directions) < 1:
            raise _unknown(text)
        return cls(text, kind, sparsity, probes_per_pass, directions)


def _unknown(text: str) -> UserError:
    return UserError(
        "unknown variant",
        got=text,
        expected=f"{', '.join(KINDS[:-1])} with [:SPARSITY], or "
        "ours[:SPARSITY[:PROBES_PER_PASS[:DIRECTIONS]]]; "
        "SPARSITY from 0 to 1, PROBES_PER_PASS and DIRECTIONS at least 1",
        fix="for example mezo_reference ours:0 ours:0.75 ours:0.75:1",
    )


@dataclass(frozen=True)
class Setting:
    """The conditions under which variants are measured; each is a column of `table.COLUMNS`.

    `micro_batches` may be None for one per rank.
    """

    shape: str
    layers: int
    ds_config: str | None
    partition_size: int | None
    dtype: Dtype
    update_precision: UpdatePrecision
    task: str
    length: int
    batch: int
    micro_batches: int | None

    @property
    def workload(self) -> Workload:
        """Size of a step's batch."""
        return replace(typical_workload(self.task), length=self.length, batch_size=self.batch)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `read_setting` reads."""
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="opt-125m", help="size of the model")
    add("--layers", type=positive, metavar="N", help="number of blocks (default: the shape's)")
    add("--ds-config", metavar="FILE", help="DeepSpeed JSON; see ds_configs")
    add("--partition-size", type=positive, metavar="N", help="number of ranks that share the weights")
    add("--task", default="sst2", help="use typical inputs of this task")
    add("--length", type=positive, metavar="N", help="tokens per example (default: typical of the task)")
    add(
        "--micro-batches", type=positive, metavar="N", help="parts that our step runs (default: one per rank)"
    )
    add("--batch", type=positive, default=16, metavar="N", help="examples per step, over all ranks")
    add("--dtype", choices=get_args(Dtype), default="fp32", help="of the weights")
    add(
        "--update-precision",
        choices=get_args(UpdatePrecision),
        default="fp32_master",
        help="of 16-bit weights",
    )


def read_setting(arguments: argparse.Namespace) -> Setting:
    """Return the setting that the arguments of `add_arguments` give.

    Raises:
        UserError: an unknown task, or a length that does not fit the task's answers or the model.
    """
    typical = typical_workload(arguments.task)
    length = arguments.length or typical.length
    if not typical.candidate_tokens < length <= MAX_LENGTH:
        raise UserError(
            "--length does not fit",
            got=str(length),
            expected=f"{typical.candidate_tokens + 1} to {MAX_LENGTH} tokens",
            fix="give another --length",
        )
    return Setting(
        shape=arguments.shape,
        layers=arguments.layers or SHAPES[arguments.shape].num_blocks,
        ds_config=arguments.ds_config,
        partition_size=arguments.partition_size,
        dtype=arguments.dtype,
        update_precision=arguments.update_precision,
        task=arguments.task.lower(),
        length=length,
        batch=arguments.batch,
        micro_batches=arguments.micro_batches,
    )
