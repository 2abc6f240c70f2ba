"""The settings of a benchmark on the command line."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

from lezo_ds.noise import UpdatePrecision
from lezo_ds.sharding.checkpoint_files import DTYPES
from lezo_ds.tools.benchmark.results import ModelSettings, Settings
from lezo_ds.tools.benchmark.shapes import SHAPES, TASKS

T = TypeVar("T")
_LISTS = ("shape", "layers", "ds_config", "partition_size", "task", "length", "micro_batches")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add what `read_settings` reads."""
    add, count = parser.add_argument, _list_of(positive)
    add("--shape", type=_list_of(_name(SHAPES)), default="opt-125m", help=f"of: {', '.join(SHAPES)}")
    add("--layers", type=count, metavar="K,...", help="blocks, to scale a shape down")
    add("--task", type=_list_of(_name(TASKS)), default="sst2", help=f"typical inputs of: {', '.join(TASKS)}")
    add("--length", type=count, metavar="N,...", help="tokens of an example, in the place of the task's")
    add("--micro-batches", type=count, metavar="N,...", help="of our step; one a rank by default")
    add("--ds-config", type=_list_of(str), metavar="FILE,...", help="DeepSpeed JSON; see ds_configs")
    add("--partition-size", type=count, metavar="N,...", help="ranks that share the weights; all by default")
    add("--one-at-a-time", action="store_true", help="do not combine lists: vary one, at the others' first")
    add("--batch", type=positive, metavar="N", help="examples of a step, over all ranks; 16 by default")
    add("--dtype", choices=DTYPES, default="fp32", help="of the weights")
    add("--update-precision", choices=get_args(UpdatePrecision), default="fp32_master", help="in 16 bits")
    add("--rounds", type=positive, default=5, metavar="N", help="timed steps of a variant")
    add("--threads", type=positive, default=1, metavar="N", help="of each rank on a CPU")


def read_settings(arguments: argparse.Namespace) -> list[Settings]:
    """Return the settings that arguments of `add_settings` give, those of a model next to each other.

    Raises:
        UserError: a length that does not fit the task's candidates or the model.
    """
    lists = [getattr(arguments, name) or [None] for name in _LISTS]
    rows = _one_at_a_time(lists) if arguments.one_at_a_time else list(itertools.product(*lists))
    return [_settings(arguments, *row) for row in rows]


def _settings(
    arguments: argparse.Namespace,
    shape: str,
    layers: int | None,
    ds_config: str | None,
    partition_size: int | None,
    task: str,
    length: int | None,
    micro_batches: int | None,
) -> Settings:
    typical = TASKS[task]
    workload = replace(
        typical, batch_size=arguments.batch or typical.batch_size, length=length or typical.length
    )
    dtype, precision = arguments.dtype, arguments.update_precision
    model = ModelSettings(shape, layers, dtype, precision, ds_config, partition_size)
    return Settings(model, workload, micro_batches, arguments.rounds, arguments.threads)


def _one_at_a_time(lists: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return rows where one list varies and the others stand at their first value; the last list first.

    >>> _one_at_a_time([[1, 2], [5, 6, 7]])
    [(1, 5), (1, 6), (1, 7), (2, 5)]
    """
    first = tuple(values[0] for values in lists)
    rows = [first]
    for place in reversed(range(len(lists))):
        rows += [(*first[:place], value, *first[place + 1 :]) for value in lists[place][1:]]
    return rows


def _list_of(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    def read_list(text: str) -> list[T]:
        return [read(item) for item in text.split(",")]

    return read_list


def _name(known: Sequence[str] | dict[str, Any]) -> Callable[[str], str]:
    def read_name(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(known)}")
        return text

    return read_name


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number
