"""Runs that only get worse: the base model is a candidate for the best step, and the user is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from assets import REPOSITORY
from commands import run_forked_well
from run_ends import results_of
from tiny_tasks import NUM_POSITIONS, write_tasks, write_writer

from lezo_ds.data.objectives import reward
from lezo_ds.model.snapshots import read_manifest, snapshot_steps
from lezo_ds.runs.screen import WORSE

pytestmark = pytest.mark.distributed

OWN = Path(__file__).parent
PATH = os.pathsep.join(map(str, (REPOSITORY, OWN, OWN.parent / "helpers")))
SQUAD = ["data.task=squad", f"data.max_length={NUM_POSITIONS}", "data.num_train=12", "data.num_dev=5"]
SQUAD += ["data.num_test=7", "generation.max_new_tokens=12", "zo.learning_rate=30"]
KINDS = {
    "lezo": ["zo.learning_rate=1"],
    "adamw": ["method=adamw", "adamw.learning_rate=1"],
    "generation": SQUAD,
    "reward": [*SQUAD, "train.objective=test_worse_than_base:variety"],
}


@reward
def variety(answers, records):
    return [float(len(set(answer))) for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_gets_worse_says_so_and_gives_the_base_model(kind, recipe, tmp_path):
    run_dir, out, keys = tmp_path / "run", tmp_path / "model", KINDS[kind]
    if "data.task=squad" in keys:
        data = write_tasks(tmp_path / "data") / "squad"
        keys = [*keys, f"model.path={write_writer(tmp_path / 'writer')}", f"data.path={data}"]
    arguments = ["--config", recipe, f"run_dir={run_dir}", "train.keep_snapshots=1", *keys]
    finished = run_forked_well(arguments, PYTHONPATH=PATH)
    assert WORSE in finished.out
    results = results_of(run_dir)
    assert (results["best_step"], results["worse_than_base"], results["steps"]) == (0, True, 8)
    assert results["best_dev_loss"] < results["trained_dev_loss"]
    assert results["test"] == results["zero_shot"]
    assert results["weights_digest"] == results["model_fingerprint"]
    assert snapshot_steps(run_dir / "snapshots") == [8]
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    losses = {line["step"]: line["dev_loss"] for line in lines if "dev_loss" in line}
    assert (list(losses), losses[0]) == ([0, 4, 8], results["best_dev_loss"])

    sources = [["--run", run_dir]]
    if kind == "lezo":
        run_forked_well(["--run", run_dir, "--journal", tmp_path / "run.lezo"], program="export.py")
        sources.append(["--journal", tmp_path / "run.lezo", f"model.path={recipe.parent / 'model'}"])
    for number, source in enumerate(sources):
        target = out / str(number)
        exported = run_forked_well([*source, "--step", "best", "--out", target], program="export.py")
        assert WORSE in exported.err and WORSE in (target / "README.md").read_text()
        manifest = read_manifest(target)
        assert (manifest["step"], manifest["digest"]) == (0, results["model_fingerprint"])
    named = [key for key in keys if key.startswith("train.objective=")]
    arguments = ["--run", run_dir, "--json", *named]
    scored = json.loads(run_forked_well(arguments, program="evaluate.py", PYTHONPATH=PATH).out)
    assert (scored["step"], scored["score"]) == (0, results["zero_shot"])
