"""Runs that only get worse: the base model is a candidate for the best step, and the user is
told."""

from __future__ import annotations

import json

import pytest
from assets import REPOSITORY
from commands import run_forked_well
from run_ends import results_of
from tiny_tasks import NUM_POSITIONS, write_tasks, write_writer

from lezo_ds.checkpoints.snapshots import read_manifest, snapshot_steps
from lezo_ds.data.objectives import reward
from lezo_ds.runs.screen import WORSE

pytestmark = pytest.mark.distributed

PATH = ":".join(f"{REPOSITORY}/{folder}" for folder in ("", "tests/helpers", "tests/runs"))
KINDS = {
    "lezo": ["zo.learning_rate=1"],
    "adamw": ["method=adamw", "adamw.learning_rate=1"],
    "reward": [
        "zo.learning_rate=30",
        "train.objective=test_worse_than_base:variety",
        "generation.max_new_tokens=12",
    ],
}


@reward
def variety(answers, records):
    return [float(len(set(answer))) for answer in answers]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_gets_worse_says_so_and_gives_the_base_model(kind, recipe, tmp_path):
    run_dir, model, keys = tmp_path / "run", recipe.parent / "model", KINDS[kind]
    if kind == "reward":
        data, model = write_tasks(tmp_path / "data") / "squad", write_writer(tmp_path / "writer")
        keys = [*keys, "data.task=squad", f"data.path={data}", f"data.max_length={NUM_POSITIONS}"]
        keys += [f"data.{split}=9" for split in ("num_train", "num_dev", "num_test")]
    arguments = [f"run_dir={run_dir}", f"model.path={model}", "train.keep_snapshots=1", *keys]
    assert WORSE in run_forked_well(["--config", recipe, *arguments], PYTHONPATH=PATH).out
    results = results_of(run_dir)
    assert (results["best_step"], results["worse_than_base"], results["steps"]) == (0, True, 8)
    assert results["best_dev_loss"] < results["trained_dev_loss"]
    assert results["test"] == results["zero_shot"]
    assert snapshot_steps(run_dir / "snapshots") == [8]
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "dev_loss" in line] == [0, 4, 8]

    source = ["--run", run_dir]
    if kind == "lezo":
        scored = json.loads(run_forked_well([*source, "--json"], program="evaluate").out)
        assert (scored["step"], scored["score"]) == (0, results["zero_shot"])
        run_forked_well([*source, "--journal", tmp_path / "run.lezo"], program="export")
        source = ["--journal", tmp_path / "run.lezo", f"model.path={model}"]
    exported = run_forked_well([*source, "--out", tmp_path / "out"], program="export")
    assert WORSE in exported.err and WORSE in (tmp_path / "out" / "README.md").read_text()
    digests = read_manifest(tmp_path / "out")["digest"], results["weights_digest"]
    assert digests == (results["model_fingerprint"],) * 2
