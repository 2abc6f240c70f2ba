"""What a benchmark measures: variants of a step and settings, as the command line gives them."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args, get_type_hints

from lezo_ds.config import Dtype, ZoConfig
from lezo_ds.errors import UserError
from lezo_ds.tools.opt_shapes import MAX_LENGTH, SHAPES
from lezo_ds.tools.workloads import Workload, typical_workload

T = TypeVar("T")
KINDS = ("mezo_reference", "mezo_fused", "naive_zero3", "ours")
_LISTS = ("shape", "layers", "ds_config", "partition_size", "task", "length", "micro_batches")
_PRECISIONS = get_args(get_type_hints(ZoConfig)["update_precision"])


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
        kind, *more = text.split(":")
        try:
            sparsity = float(more[0]) if more else 0.0
            probes_per_pass = int(more[1]) if len(more) > 1 else 2
            directions = int(more[2]) if len(more) > 2 else 1
        except ValueError:
            raise _unknown(text) from None
        known = kind in KINDS and 0 <= sparsity <= 1 and min(probes_per_pass, directions) > 0
        if not known or len(more) > (3 if kind == "ours" else 1):
            raise _unknown(text)
        return cls(text, kind, sparsity, probes_per_pass, directions)

    def columns(self) -> dict[str, Any]:
        """Return the variant's values in the table of results."""
        own = ("probes_per_pass", "directions") if self.kind == "ours" else ()
        return {"variant": self.text, **{name: getattr(self, name) for name in ("kind", "sparsity", *own)}}


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
    """The conditions under which variants are measured; for the rest see the columns in `table`.

    Attributes:
        workload: size of the step's batch.
        micro_batches: number of parts that our step runs the batch in; None for one per rank.
    """

    shape: str
    layers: int
    ds_config: str | None
    partition_size: int | None
    dtype: Dtype
    update_precision: str
    task: str
    workload: Workload
    micro_batches: int | None

    def columns(self) -> dict[str, Any]:
        """Return the setting's values in the table of results."""
        own = {name: value for name, value in vars(self).items() if name != "workload"}
        size = self.workload
        batch = {"length": size.length, "candidates": size.num_candidates, "batch": size.batch_size}
        return own | batch | {"candidate_tokens": size.candidate_tokens}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `read_settings` reads."""
    add, counts, names = parser.add_argument, _list_of(positive), _list_of(str)
    add("--shape", type=names, default="opt-125m", help=f"size of the model: {', '.join(SHAPES)}")
    add("--layers", type=counts, default=[None], metavar="N,...", help="blocks (default: the shape's)")
    add("--ds-config", type=names, default=[None], metavar="FILE,...", help="DeepSpeed JSON; see ds_configs")
    add("--partition-size", type=counts, default=[None], metavar="N,...", help="ranks that share the weights")
    add("--task", type=names, default="sst2", help="use typical inputs of these tasks")
    add("--length", type=counts, default=[None], metavar="N,...", help="tokens per example")
    add("--micro-batches", type=counts, default=[None], metavar="N,...", help="parts that our step runs")
    add("--batch", type=positive, default=16, metavar="N", help="examples per step, over all ranks")
    add("--dtype", choices=get_args(Dtype), default="fp32", help="of the weights")
    add("--update-precision", choices=_PRECISIONS, default="fp32_master", help="of 16-bit weights")


def read_settings(arguments: argparse.Namespace) -> list[Setting]:
    """Return all combinations of the lists in arguments of `add_arguments`; those of one model are adjacent.

    Raises:
        UserError: an unknown shape or task, or a length that does not fit the task's answers or the model.
    """
    settings = []
    lists = [getattr(arguments, name) for name in _LISTS]
    for shape, layers, ds_config, partition_size, task, length, micro_batches in itertools.product(*lists):
        if shape not in SHAPES:
            raise UserError("unknown --shape", got=shape, expected=", ".join(SHAPES), fix="give one of these")
        typical = typical_workload(task)
        workload = replace(typical, length=length or typical.length, batch_size=arguments.batch)
        if not workload.candidate_tokens < workload.length <= MAX_LENGTH:
            fits = f"{workload.candidate_tokens + 1} to {MAX_LENGTH} tokens"
            raise UserError("--length does not fit", got=length, expected=fits, fix="give another --length")
        setting = Setting(
            shape=shape,
            layers=layers or SHAPES[shape].num_blocks,
            ds_config=ds_config,
            partition_size=partition_size,
            dtype=arguments.dtype,
            update_precision=arguments.update_precision,
            task=task.lower(),
            workload=workload,
            micro_batches=micro_batches,
        )
        settings.append(setting)
    return settings


def _list_of(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    return lambda text: [read(item) for item in text.split(",")]


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)
