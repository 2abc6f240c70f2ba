"""Bad input ends in one line with a fix and exit code 2, before weights load and before anything
is written.

The weights of the models are those of another: a check that came only after loading them would end
in that. Values that are merely out of range are tested with the configuration.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from assets import NUM_POSITIONS, write_recipe, write_records
from commands import assert_one_error, run_forked, run_forked_well
from safetensors.torch import save_file

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("inputs")
    write_recipe(directory)
    shutil.copytree(directory / "model", directory / "whole_model")
    shutil.copytree(directory / "model", directory / "t5")
    (directory / "t5" / "config.json").write_text(json.dumps({"model_type": "t5"}))
    for name in ("model", "t5"):
        save_file({"other": torch.zeros(1)}, directory / name / "model.safetensors")
    shutil.copytree(directory / "model", directory / "no_weights")
    (directory / "no_weights" / "model.safetensors").unlink()
    (directory / "no_config").mkdir()
    long = [{"sentence": "great " * 100, "label": i % 2, "idx": i} for i in range(60)]
    for split in ("train", "validation"):
        write_records(directory / "long" / f"{split}.jsonl", long)
    (directory / "file").write_text("not a directory")
    return directory


REFUSED = {
    "no weights": (["model.path={inputs}/no_weights"], ["no weights"]),
    "hub model offline": (["model.path=facebook/opt-1.3b"], ["facebook/opt-1.3b"]),
    "weights of another model": ([], ["lacks 68 of the model"]),
    "no config": (["model.path={inputs}/no_config"], ["config.json"]),
    "no decoder": (["model.path={inputs}/t5"], ["T5Config"]),
    "hub data offline": (["data.path=null"], ["nyu-mll/glue", "data.path"]),
    "no positions": (["data.path={inputs}/long"], [str(NUM_POSITIONS), "data.max_length"]),
    "a file": (
        ["run_dir={inputs}/file", "model.path={inputs}/whole_model"],
        ["{inputs}/file is a file; fix: set another run_dir"],
    ),
    "misspelt": (["model.path={inputs}/whole_modl"], ["whole_modl"]),
}
REFUSED_DRY = ("weights of another model", "a file", "misspelt")


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_weights_load(name, inputs, tmp_path):
    words, fragments = (
        [part.replace("{inputs}", str(inputs)) for part in parts] for parts in REFUSED[name]
    )
    for dry in ([], ["--dry-run"]) if name in REFUSED_DRY else ([],):
        words += dry
        finished = run_forked(
            ["--config", inputs / "recipe.yaml", f"run_dir={tmp_path / 'run'}", *words]
        )
        assert_one_error(finished, 2, *fragments)
        assert not (tmp_path / "run").exists()


def test_a_model_is_not_opened_as_another_one(inputs):
    words = ["--model", inputs / "whole_model", f"data.path={inputs / 'data'}", "data.task=sst2"]
    for key in ("peft.kind=prefix", "peft.kind=lora"):
        finished = run_forked([*words, key], program="evaluate")
        assert_one_error(finished, 2, "is none and cannot be", "fix: remove peft.kind=...")


def test_a_run_is_not_resumed_with_other_settings_or_inputs_and_left_as_it_was(inputs, tmp_path):
    def contents():
        return {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file() and p.name != ".lock"}

    run_dir, data = tmp_path / "run", shutil.copytree(inputs / "data", tmp_path / "data")
    model = shutil.copytree(inputs / "whole_model", tmp_path / "model")
    whole = [
        "--config",
        inputs / "recipe.yaml",
        f"run_dir={run_dir}",
        f"model.path={inputs}/whole_model",
    ]
    run_forked_well([*whole, "train.steps=2"])
    moved = ["train.steps=2", f"model.path={model}", f"data.path={data}"]  # files may move
    warned = run_forked_well([*whole, *moved], CUBLAS_WORKSPACE_CONFIG=":16:8").err
    assert (
        warned.count("CUBLAS_WORKSPACE_CONFIG was 'not set' when the journal was started and is ")
        == 1
    )
    before = contents()
    records = [json.loads(line) for line in (data / "validation.jsonl").read_text().splitlines()]
    write_records(
        data / "validation.jsonl", [record | {"label": 1 - record["label"]} for record in records]
    )
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    refused = (
        ("seed", "seed=1"),
        ("train.steps", "train.steps=1"),
        ("seed", "seed=1", "--dry-run"),
        ("data_fingerprints.test differs", f"data.path={data}"),
        ("base model of the run: its fingerprint", f"model.path={model}"),
    )
    for fragment, key, *more in refused:
        finished = run_forked(
            [*whole, "train.steps=2", key, *more], num_ranks=1 + (key == "seed=1" and not more)
        )
        assert_one_error(finished, 2, fragment)
        assert "loading" not in finished.err or "fingerprint" in fragment
    assert "time " in run_forked_well([*whole, "train.steps=2", "--dry-run"]).out
    assert contents() == before
