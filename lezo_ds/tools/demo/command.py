"""The demonstration: assets, one run a seed through the real launcher on two CPU ranks, and a table."""

from __future__ import annotations

import json
import logging
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lezo_ds.distributed import free_port
from lezo_ds.errors import LezoError, UserError
from lezo_ds.tools.demo.pretrain import make_demo_assets
from lezo_ds.tools.logged_command import run_logged

RECIPE = Path("launch/recipes/demo.yaml")
NUM_RANKS = 2
MEANING = """\
What this shows: the pre-trained model can tell praise from blame, but it answers "terrible" nearly always,
so that its zero-shot accuracy is close to the majority class. Zeroth-order fine-tuning removes that bias;
most of the gain is this, not sentiment learned from the training examples."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """A finished run.

    Attributes:
        seed: of the run.
        run_dir: its directory.
        results: what its results.json holds.
    """

    seed: int
    run_dir: Path
    results: dict[str, Any]


def demonstrate(directory: Path, seeds: Sequence[int], overrides: Sequence[str] = ()) -> list[Outcome]:
    """Make the assets and fine-tune once for each seed; what is there already is kept, or resumed.

    Args:
        directory: where assets, runs and their logs go.
        seeds: of the runs, at least one; the assets are the same for all.
        overrides: key=value changes to launch/recipes/demo.yaml.

    Raises:
        UserError: not started from the root of the repository, or `directory` holds something else.
        LezoError: a run ended with an error.
    """
    if not RECIPE.is_file():
        raise UserError(
            f"{RECIPE} is not here",
            got=f"current directory {Path.cwd()}",
            expected="the root of the repository",
            fix="change to it",
        )
    assets = directory / "assets"
    logger.info("Data and pre-trained model: %s (made now if not there, in about a minute)", assets)
    make_demo_assets(assets)
    return [_run(directory, seed, overrides) for seed in seeds]


def report(outcomes: Sequence[Outcome]) -> str:
    """Return a table of at least one run, their mean and deviation, and what a step communicates."""
    lines = ["     seed  zero-shot  final  majority class  best step  seconds  run directory"]
    for outcome in outcomes:
        found = outcome.results
        scores = f"{found['zero_shot']:9.3f}  {found['test']:5.3f}  {found['majority_class']:14.3f}"
        cost = f"{found['best_step']:9d}  {found['seconds']:7.0f}"
        lines.append(f"{outcome.seed:9d}  {scores}  {cost}  {outcome.run_dir}")
    zero_shot = [outcome.results["zero_shot"] for outcome in outcomes]
    final = [outcome.results["test"] for outcome in outcomes]
    lines.append(f"     mean  {statistics.mean(zero_shot):9.3f}  {statistics.mean(final):5.3f}")
    if len(outcomes) > 1:
        lines.append(f"deviation  {statistics.stdev(zero_shot):9.3f}  {statistics.stdev(final):5.3f}")
    sent = outcomes[0].results["bytes_per_step"]
    lines.append(
        f"\nA step gathers {sent['gathered']:,} bytes of weights; "
        f"everything else it communicates is {sent['other']:,} bytes."
    )
    return "\n".join([*lines, "", MEANING])


def _run(directory: Path, seed: int, overrides: Sequence[str]) -> Outcome:
    run_dir, log = directory / f"seed-{seed}", directory / f"seed-{seed}.log"
    command = [
        *(str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(NUM_RANKS)),
        *("--master_port", str(free_port()), "launch/train.py", "--config", str(RECIPE)),
        *(f"seed={seed}", f"run_dir={run_dir}"),
        *(f"model.path={directory / 'assets' / 'model'}", f"data.path={directory / 'assets' / 'data'}"),
        *overrides,
    ]
    logger.info("Seed %d (all output in %s):", seed, log)
    # A GPU, if there is one, is left alone: the recipe's two ranks need two of them, or none.
    code = run_logged(command, log, {"DS_ACCELERATOR": "cpu"})
    if code:
        raise LezoError(f"the run of seed {seed} ended with exit code {code}; fix: see {log}")
    return Outcome(seed, run_dir, json.loads((run_dir / "results.json").read_text()))
