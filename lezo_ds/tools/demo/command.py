"""The demonstration: make data and model, start one run per seed on two CPU ranks, and print a table."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lezo_ds.distributed import free_port
from lezo_ds.errors import LezoError, UserError
from lezo_ds.tools.demo.pretrain import make_demo_assets
from lezo_ds.tools.logged_command import run_logged

RECIPE = Path("launch/recipes/demo.yaml")
NUM_RANKS = 2
MEANING = """\
What this shows: the pre-trained model can tell praise from blame, but it almost always answers "terrible",
so its zero-shot accuracy is close to the majority class. Zeroth-order fine-tuning removes that bias. Most of
the gain comes from this, not from sentiment learned from the training examples."""

_COLUMNS = {
    "zero_shot": "zero-shot",
    "test": "final",
    "majority_class": "majority class",
    "best_step": "best step",
    "seconds": "seconds",
    "run_dir": "run directory",
}

logger = logging.getLogger(__name__)


def demonstrate(
    directory: Path, seeds: Sequence[int], overrides: Sequence[str] = ()
) -> dict[int, dict[str, Any]]:
    """Make data and model, and fine-tune once for each seed. Finished work is kept and started runs resume.

    Args:
        directory: directory for data, model, runs and their logs.
        seeds: seeds of the runs, at least one. All runs share data and model.
        overrides: key=value changes to launch/recipes/demo.yaml.

    Returns:
        The content of each run's results.json and its run_dir, by seed.

    Raises:
        UserError: the current directory is not the root of the repository, or `directory` holds other files.
        LezoError: a run ended with an error.
    """
    if not RECIPE.is_file():
        raise UserError(
            f"{RECIPE} is not here",
            got=f"current directory {Path.cwd()}",
            expected="the root of the repository",
            fix="change to that directory",
        )
    assets = directory / "assets"
    logger.info("Data and pre-trained model: %s (if they are missing, this takes about a minute)", assets)
    make_demo_assets(assets)
    return {seed: _run(directory, seed, overrides) for seed in seeds}


def report(results: Mapping[int, Mapping[str, Any]]) -> str:
    """Return a table of all runs with mean and deviation, and the bytes that a step communicates.

    Args:
        results: from `demonstrate`, of at least one run.
    """
    runs = pd.DataFrame(results).T[list(_COLUMNS)].rename("seed {}".format)
    scores = runs[["zero_shot", "test"]].astype(float).agg(["mean", "std"])
    # The deviation of a single run is NaN, and its row is dropped.
    table = pd.concat([runs, scores.rename({"std": "deviation"}).dropna()])
    whole = dict.fromkeys(("best_step", "seconds"), "{:.0f}".format)
    text = table.to_string(
        header=list(_COLUMNS.values()), float_format="{:.3f}".format, formatters=whole, na_rep=""
    )
    sent = next(iter(results.values()))["bytes_per_step"]
    traffic = (
        f"A step gathers {sent['gathered']:,} bytes of weights. "
        f"Everything else it communicates is {sent['other']:,} bytes."
    )
    return f"{text}\n\n{traffic}\n\n{MEANING}"


def _run(directory: Path, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    run_dir, log = directory / f"seed-{seed}", directory / f"seed-{seed}.log"
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    ranks = ["--num_gpus", str(NUM_RANKS), "--master_port", str(free_port())]
    assets = [f"model.path={directory / 'assets' / 'model'}", f"data.path={directory / 'assets' / 'data'}"]
    recipe = ["--config", str(RECIPE), f"seed={seed}", f"run_dir={run_dir}", *assets, *overrides]
    logger.info("Seed %d (all output in %s):", seed, log)
    # The recipe has two ranks. They run on the CPU because this machine may have only one GPU.
    code = run_logged([launcher, *ranks, "launch/train.py", *recipe], log, {"DS_ACCELERATOR": "cpu"})
    if code:
        raise LezoError(f"the run of seed {seed} ended with exit code {code}; fix: see {log}")
    return {**json.loads((run_dir / "results.json").read_text()), "run_dir": str(run_dir)}
