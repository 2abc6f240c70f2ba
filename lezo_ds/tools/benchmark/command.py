"""The benchmark itself: measure, print and keep rows."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import torch

from lezo_ds import distributed
from lezo_ds.tools.benchmark import table
from lezo_ds.tools.benchmark.measure import Row, measure_steps
from lezo_ds.tools.benchmark.noise import measure_noise
from lezo_ds.tools.benchmark.settings import Setting, Variant

_LIBRARIES = ("lezo_ds", "torch", "deepspeed")


def run(arguments: Namespace, settings: Sequence[Setting], variants: Sequence[Variant]) -> None:
    """Measure, append the rows to the CSV `arguments.out` as they come, and print them. A collective."""
    distributed.init_distributed()
    if arguments.out is not None:
        distributed.on_rank_zero(lambda: table.append(arguments.out, []))  # fails now, not after the work
    origin, rows = _origin(), []
    for measured in _measure(arguments, settings, variants):
        added = [origin | row for row in measured]
        rows += added
        if distributed.rank() == 0 and arguments.out is not None:
            table.append(arguments.out, added)
    if distributed.rank() == 0:
        print(summary(table.to_frame(rows)))


def _measure(
    arguments: Namespace, settings: Sequence[Setting], variants: Sequence[Variant]
) -> Iterator[list[Row]]:
    rounds, threads = arguments.rounds, arguments.threads
    if arguments.noise:
        yield measure_noise(arguments.dtype, arguments.noise, rounds=rounds, threads=threads)
    if variants:
        yield from measure_steps(settings, variants, rounds=rounds, threads=threads, replay=arguments.replay)


def _origin() -> Row:
    """Return when, on what and by which command rows were measured."""
    ranks = distributed.world_size()
    launcher = ["python"] if ranks == 1 else ["deepspeed", "--num_gpus", str(ranks)]
    own = [argument for argument in sys.argv if not argument.startswith("--local_rank")]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*launcher, *own]),
        "machine": _machine(),
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
    }


def _machine() -> str:
    if distributed.device().type == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{[*names, platform.processor()][0]}, {os.cpu_count()} cores"


def summary(results: pd.DataFrame) -> str:
    """Return results as text: for each kind of row what is the same in all, then a table of what differs."""
    parts = []
    for measured, group in results.groupby("measured", sort=False):
        known = group.drop(columns="measured").dropna(axis="columns", how="all")
        constant = [name for name in known if len(group) > 1 and known[name].nunique(dropna=False) == 1]
        parts.append(f"{measured}: " + ", ".join(f"{name} {known[name].iloc[0]}" for name in constant))
        shown = known.drop(columns=constant)
        parts.append(shown.to_string(index=False, na_rep="-", float_format="{:.4g}".format))
    return "\n\n".join(parts)
