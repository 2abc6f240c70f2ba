"""Bad input ends in one line with a fix and exit code 2, before weights load or files change."""

import shutil

import pytest
import torch
from assets import read_lines, write_recipe, write_records
from commands import assert_refused, run_words, train
from safetensors.torch import save_file

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("inputs")
    write_recipe(directory)
    shutil.copytree(directory / "model", directory / "whole_model")
    save_file({"other": torch.zeros(1)}, directory / "model" / "model.safetensors")
    long = [{"sentence": "great " * 100, "label": i % 2, "idx": i} for i in range(60)]
    for split in ("train", "validation"):
        write_records(directory / "long" / f"{split}.jsonl", long)
    (directory / "file").write_text("not a directory")
    (directory / "mine").mkdir()
    (directory / "mine" / "config.yaml").touch()
    return directory


REFUSED = {
    "weights of another model": ("", "lacks 68 of the model"),
    "hub data offline": ("data.path=null", "nyu-mll/glue"),
    "no positions": ("data.path={inputs}/long", "data.max_length"),
    "a file": ("model.path={inputs}/whole_model run_dir={inputs}/file", "/file is a file; fix: "),
    "taken": ("model.path={inputs}/whole_model run_dir={inputs}/mine", "has config.yaml, and no"),
    "nowhere": ("model.path={inputs}/whole_model run_dir=", "run_dir is empty; fix: "),
    "misspelt": ("model.path={inputs}/whole_modl", "whole_modl"),
}
REFUSED_DRY = ("weights of another model", "a file", "taken", "nowhere", "misspelt")


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_weights_load(name, inputs, tmp_path):
    keys, message = REFUSED[name]
    words = run_words(inputs / "recipe.yaml", tmp_path / "run")
    words += keys.replace("{inputs}", str(inputs)).split()
    for more in ([], ["--dry-run"]) if name in REFUSED_DRY else ([],):
        assert_refused("train", [*words, *more], message)
        assert not (tmp_path / "run").exists()


def test_a_model_is_not_opened_as_another_one(inputs):
    words = ["--model", inputs / "whole_model", f"data.path={inputs / 'data'}", "data.task=sst2"]
    for key in ("peft.kind=prefix", "peft.kind=lora"):
        expected = ("is none and cannot be", "fix: remove peft.kind=...")
        assert_refused("evaluate", [*words, key], *expected)


def test_a_run_is_not_resumed_with_other_settings_or_inputs_and_left_as_it_was(inputs, tmp_path):
    def contents():
        return {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file() and p.name != ".lock"}

    run_dir, data = tmp_path / "run", shutil.copytree(inputs / "data", tmp_path / "data")
    model = shutil.copytree(inputs / "whole_model", tmp_path / "model")
    recipe = inputs / "recipe.yaml"
    whole = [f"model.path={inputs}/whole_model", "train.steps=2"]
    train(recipe, run_dir, *whole)
    moved = [f"model.path={model}", f"data.path={data}"]  # files may move
    warned = train(recipe, run_dir, *whole, *moved, CUBLAS_WORKSPACE_CONFIG=":16:8").err
    assert warned.count("CUBLAS_WORKSPACE_CONFIG was 'not set' when the journal was started") == 1
    before = contents()
    records = read_lines(data / "validation.jsonl")
    opposite = [record | {"label": 1 - record["label"]} for record in records]
    write_records(data / "validation.jsonl", opposite)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    refused = (
        ("seed", 2, "seed=1"),
        ("train.steps", 1, "train.steps=1"),
        ("seed", 1, "seed=1", "--dry-run"),
        ("data_fingerprints.test differs", 1, f"data.path={data}"),
        ("base model of the run: its fingerprint", 1, f"model.path={model}"),
    )
    for fragment, num_ranks, *more in refused:
        words = run_words(recipe, run_dir, *whole, *more)
        finished = assert_refused("train", words, fragment, num_ranks=num_ranks)
        assert "loading" not in finished.err or "fingerprint" in fragment
    assert "time " in train(recipe, run_dir, *whole, "--dry-run").out
    assert contents() == before
