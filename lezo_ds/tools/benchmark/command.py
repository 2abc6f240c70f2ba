"""The benchmark itself: measure, print and keep rows."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
import os
import platform
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
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
    out, rounds, threads = arguments.out, arguments.rounds, arguments.threads
    if out is not None:
        distributed.on_rank_zero(lambda: table.append(out, []))  # a bad file is found before the work
    found: list[list[Row]] = []
    measured = measure_steps(settings, variants, rounds=rounds, threads=threads, replay=arguments.replay)
    if arguments.noise:
        noise = measure_noise(arguments.dtype, arguments.noise, rounds=rounds, threads=threads)
        measured = itertools.chain([noise], measured)
    origin = _origin()
    for rows in measured:
        found.append([origin | row for row in rows])
        if out is not None and distributed.rank() == 0:
            table.append(out, found[-1])
    if distributed.rank() == 0:
        print(summary(table.to_frame(itertools.chain(*found))))


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
    """Return results as text: for each kind of row the columns that do not vary, then a table of the rest."""
    parts = []
    for measured, group in results.drop(columns=["date", "command"]).groupby("measured", sort=False):
        known = group.drop(columns="measured").dropna(axis="columns", how="all")
        constant = [name for name in known if len(group) > 1 and known[name].nunique(dropna=False) == 1]
        varying = known.drop(columns=constant).astype(object)
        parts.append(f"{measured}: " + ", ".join(f"{name} {known[name].iloc[0]}" for name in constant))
        parts.append(varying.where(varying.notna(), "-").to_string(index=False, float_format="{:.4g}".format))
    return "\n\n".join(parts)
