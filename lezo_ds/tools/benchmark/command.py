"""The benchmark itself: measure, print and keep rows."""

from __future__ import annotations

import datetime
import os
import shlex
import sys
from argparse import Namespace
from functools import partial

import torch

from lezo_ds import distributed
from lezo_ds.config import RunConfig
from lezo_ds.runs.directory import library_versions
from lezo_ds.tools.benchmark import table
from lezo_ds.tools.benchmark.inputs import Inputs
from lezo_ds.tools.benchmark.measure import Row, measure_steps
from lezo_ds.tools.benchmark.random_inputs import RandomInputs
from lezo_ds.tools.benchmark.recipe_inputs import RecipeInputs
from lezo_ds.tools.benchmark.settings import Job, Setting

_LIBRARIES = ("lezo_ds", "torch", "deepspeed")
_SHOWN = ["measured", "variant", "seconds_median", "ratio", "fed_tokens", "peak_bytes", "gathered_bytes"]


def run(arguments: Namespace, job: Job) -> None:
    """Measure, print the rows, and append them to the CSV `arguments.out`. A collective."""
    distributed.init_distributed()
    out, rounds, threads = arguments.out, arguments.rounds, arguments.threads
    if out is not None:
        distributed.on_rank_zero(
            lambda: table.append(out, table.to_frame([]))
        )  # a bad file is found before the work
    origin = origin_columns()
    rows = measure_steps(
        partial(_open_inputs, job.inputs),
        job.variants,
        rounds=rounds,
        threads=threads,
        replay=arguments.replay,
    )
    if distributed.rank() == 0:
        results = table.to_frame([origin | row for row in rows])
        if out is not None:
            table.append(out, results)
        shown = results[_SHOWN].dropna(axis="columns", how="all").astype(object)
        print(shown.where(shown.notna(), "-").to_string(index=False, float_format="{:.4g}".format))


def _open_inputs(described: Setting | RunConfig) -> Inputs:
    return RandomInputs(described) if isinstance(described, Setting) else RecipeInputs(described)


def origin_columns() -> Row:
    """Return when, on what and by which command rows were measured."""
    ranks = distributed.world_size()
    launcher = ["python"] if ranks == 1 else ["deepspeed", "--num_gpus", str(ranks)]
    versions = library_versions()
    own = [argument for argument in sys.argv if not argument.startswith("--local_rank")]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*launcher, *own]),
        "machine": _machine(),
        **{name: versions[name] for name in _LIBRARIES},
    }


def _machine() -> str:
    if distributed.device().type == "cuda":
        return torch.cuda.get_device_name()
    return f"{distributed.cpu_name()}, {os.cpu_count()} cores"
