"""Runs of directions of low rank: replayed from the page alone, refused where they cannot be."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from assets import REPOSITORY, recipe_values, write_data, write_reader
from commands import assert_one_error, run_forked, run_forked_well
from safetensors.torch import load_file
from tiny_models import FAMILIES
from tiny_runs import start_engine, write_model

from lezo_ds.errors import UserError

pytestmark = pytest.mark.distributed

KEYS = ["zo.noise_rank=2", "zo.examples_per_direction=4", "zo.estimator=grzo", "zo.weight_decay=1"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = tmp_path_factory.mktemp("low_rank")
    values = recipe_values(write_reader(root / "model"), write_data(root / "data"))
    values["train"] |= {"steps": 4, "eval_every": 4, "snapshot_every": 0}
    path = root / "recipe.json"
    path.write_text(json.dumps(values))
    return path


def test_a_program_of_numpy_replays_a_journal_from_the_page_alone(recipe, tmp_path):
    run_dir = tmp_path / "run"
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", *KEYS])
    exported = tmp_path / "exported"
    arguments = ["--run", run_dir, "--step", "last", "--out", exported]
    run_forked_well(arguments, program="export")
    base = json.loads(recipe.read_text())["model"]["path"]
    program = REPOSITORY / "tests" / "helpers" / "page_replay.py"
    replayed = tmp_path / "replayed.safetensors"
    journal = run_dir / "journal.jsonl"
    command = [sys.executable, program, journal, f"{base}/model.safetensors", replayed]
    subprocess.run(command, check=True)
    ours = {}
    for file in exported.glob("*.safetensors"):
        ours |= load_file(file)
    changed = 0
    for name, weights in load_file(replayed).items():
        assert torch.equal(weights, ours[name]), name
        changed += not torch.equal(weights, load_file(f"{base}/model.safetensors")[name])
    assert changed >= 6 * 4 - 6  # the matrices of four blocks, of which a step may drop one


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["zo.noise_rank=1", "peft.kind=prefix"], "a prefix has none"),
        (["zo.examples_per_direction=1"], "needs directions of low rank"),
        (["zo.noise_rank=1", "zo.examples_per_direction=3"], "into whole groups"),
        (["zo.estimator=grzo"], "compares directions with each other"),
        (["zo.noise_rank=1", "zo.sparsity=1"], "nothing outside them is trained"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(keys, text, recipe, tmp_path):
    refused = run_forked(["--config", recipe, f"run_dir={tmp_path / 'run'}", *keys])
    assert_one_error(refused, 2, text)


def test_a_model_with_fused_experts_is_refused(tmp_path):
    directory = write_model(FAMILIES["qwen3_moe"][0], tmp_path / "model")
    with pytest.raises(UserError, match="perturbs plain products only"):
        start_engine(directory, noise_rank=1)
