"""Bad input: one line, exit code 2, before weights are loaded, under every launcher.

The model that most of these tests name has no weights: a check that came only after loading them would be
beaten by "holds no weights".
"""

from __future__ import annotations

import json
import shutil

import pytest
from assets import NUM_POSITIONS, write_reader, write_recipe_without_weights, write_records
from commands import assert_one_error, assert_refused, deepspeed, run_forked, run_forked_well

RECORDS = [{"sentence": "a great film .", "label": i % 2, "idx": i} for i in range(60)]
LONG = [record | {"sentence": "great " * 100} for record in RECORDS]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A directory of everything that is wrong; its recipe is right but for a model without weights."""
    directory = tmp_path_factory.mktemp("inputs")
    write_recipe_without_weights(directory)
    write_reader(directory / "no_blocks", num_blocks=0)
    (directory / "no_blocks" / "model.safetensors").unlink()
    write_reader(directory / "other_model", seed=1)
    for name, records in (("empty", []), ("long", LONG)):
        write_records(directory / name / "train.jsonl", records)
        write_records(directory / name / "validation.jsonl", RECORDS)
    (directory / "no_config").mkdir()
    shutil.copytree(directory / "model", directory / "t5")
    (directory / "t5" / "config.json").write_text(json.dumps({"model_type": "t5"}))
    (directory / "stage2.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    (directory / "file").write_text("not a directory")
    return directory


@pytest.fixture(scope="module")
def finished_run(inputs):
    directory = inputs / "finished"
    run_forked_well(whole(inputs, directory))
    return directory


@pytest.fixture
def old_run(finished_run, tmp_path):
    """A copy of a finished run, to resume."""
    return shutil.copytree(finished_run, tmp_path / "run")


def whole(inputs, run_dir, *overrides):
    recipe, model = inputs / "recipe.yaml", inputs / "whole_model"
    return ["--config", recipe, f"run_dir={run_dir}", f"model.path={model}", *overrides]


def contents(directory):
    """Return the files below a directory; a lock stays in it."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path: path.read_bytes() for path in files if path.name != ".lock"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("zo.sparsit=0.5", "did you mean zo.sparsity?"),
        ("model.path={inputs}/none", "config.json"),
        ("model.path=facebook/opt-1.3b", "download the model first"),
        ("model.path={inputs}/no_config", "holds no config.json"),
        ("model.path={inputs}/t5", "T5Config is not the config of a causal language model"),
        ("model.path={inputs}/no_blocks", "no transformer blocks"),
        ("zo.estimator=nowhere:Mine", "zo.estimator=nowhere:Mine does not name"),
        ("train.batch_size=7", "train.batch_size=7 does not split"),
        ("data.path={inputs}/none", "none is not a directory"),
        ("data.path={inputs}/empty", "0 records of the train split of sst2"),
        ("data.path={inputs}/long", f"data.max_length={NUM_POSITIONS}"),
        ("data.num_train=50", "60 training records, too few for 50 + 11"),
        ("deepspeed={inputs}/stage2.json", "does not use ZeRO stage 3"),
        ("run_dir={inputs}/file", "cannot be written to"),
        ("seed=0", "holds no weights"),  # without any mistake
    ],
)
def test_bad_input_is_refused_in_one_line_before_weights_load(override, expected, inputs, tmp_path):
    words = ["--config", inputs / "recipe.yaml", f"run_dir={tmp_path / 'run'}"]
    assert_one_error(run_forked([*words, override.format(inputs=inputs)]), 2, expected)
    assert not contents(tmp_path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.path={inputs}/other_model", "model_fingerprint differs from the journal's"),
        ("zo.learning_rate=0.002", "zo.learning_rate differs from the journal's: it is 0.002, and was 0.001"),
        ("train.batch_size=4", "train.batch_size differs from the journal's"),
    ],
)
def test_a_run_directory_of_another_run_is_refused_and_left_as_it_was(override, expected, inputs, old_run):
    before = contents(old_run)
    finished = run_forked(whole(inputs, old_run, override.format(inputs=inputs)), num_ranks=2)
    assert_one_error(finished, 2, expected)
    assert contents(old_run) == before


def test_a_damaged_journal_is_refused_with_an_exit_code_of_its_own(inputs, old_run):
    path = old_run / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4][:-3] + bytes([lines[4][-3] ^ 1]) + lines[4][-2:]
    path.write_bytes(b"".join(lines))
    assert_one_error(run_forked(whole(inputs, old_run)), 3, "journal.jsonl line 5")


def test_a_launcher_passes_on_one_line_and_the_exit_code(inputs, tmp_path):
    words = ["--config", inputs / "recipe.yaml", f"run_dir={tmp_path / 'run'}", "train.micro_batch_size=8"]
    assert_refused(deepspeed(2, *words), "train.micro_batch_size to one of 1, 2, 4")
    assert not contents(tmp_path)
