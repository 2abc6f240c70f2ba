"""Data or a model that change between a stop and the resumption are refused. Files may move."""

from __future__ import annotations

import json
import shutil

import pytest
from assets import write_recipe
from commands import assert_one_error, run_forked, run_forked_well
from run_ends import end

LENGTH = ["train.eval_every=8", "train.snapshot_every=0"]


@pytest.fixture(scope="module")
def halted(tmp_path_factory):
    """A run of which half is done, with its model, data and recipe in one directory; and its end."""
    root = tmp_path_factory.mktemp("halted")
    write_recipe(root)
    run_forked_well(arguments(root, root / "undisturbed"))
    run_forked_well(arguments(root, root / "run", "train.steps=4"))
    return root


@pytest.fixture
def copy(halted, tmp_path):
    return shutil.copytree(halted, tmp_path / "copy")


def arguments(root, run_dir, *more):
    inputs = [f"model.path={root / 'model'}", f"data.path={root / 'data'}"]
    return ["--config", root / "recipe.yaml", f"run_dir={run_dir}", *inputs, *LENGTH, *more]


def change_records(path, change):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in change(records)))


def in_another_order(root):
    change_records(root / "data" / "train.jsonl", lambda records: records[::-1])


def with_other_labels(root):
    path = root / "data" / "validation.jsonl"
    change_records(path, lambda records: [record | {"label": 1 - record["label"]} for record in records])


def with_another_activation(root):
    path = root / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"activation_function": "gelu"}))


def with_other_weights(root):
    path = root / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


CHANGES = {
    in_another_order: ("data_fingerprints.dev differs",),
    with_other_labels: ("data_fingerprints.test differs",),
    with_another_activation: ("model_config.activation_function differs", "'gelu'", "'relu'"),
    with_other_weights: ("fingerprint",),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_input_that_has_changed_is_refused_with_both_values(change, copy):
    change(copy)
    journal = (copy / "run" / "journal.jsonl").read_bytes()
    assert_one_error(run_forked(arguments(copy, copy / "run")), 2, *CHANGES[change])
    assert (copy / "run" / "journal.jsonl").read_bytes() == journal


def test_weights_are_not_exported_with_another_config_and_need_no_data(copy):
    shutil.rmtree(copy / "data")
    shutil.rmtree(copy / "run" / "snapshots")
    given = ["--run", copy / "run", "--step", "last", f"model.path={copy / 'model'}"]
    run_forked_well([*given, "--out", copy / "exported"], program="export.py")
    with_another_activation(copy)
    refused = run_forked([*given, "--out", copy / "other"], program="export.py")
    assert_one_error(refused, 2, f"activation_function in {copy}/model/config.json", "'gelu'", "'relu'")


def test_files_may_move(copy):
    (copy / "data" / "notes.txt").write_text("not data")
    path = copy / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_name_or_path": "elsewhere"}, indent=4))
    run_forked_well(arguments(copy, copy / "run"))
    resumed, undisturbed = end(copy / "run"), end(copy / "undisturbed")
    assert resumed.digest == undisturbed.digest
