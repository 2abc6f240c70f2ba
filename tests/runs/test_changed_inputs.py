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


def with_other_labels(root):
    path = root / "data" / "validation.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(r | {"label": 1 - r["label"]}) + "\n" for r in records))


def with_other_weights(root):
    path = root / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


CHANGES = {
    with_other_labels: ("data_fingerprints.test differs",),
    with_other_weights: ("fingerprint",),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_input_that_has_changed_is_refused_with_both_values(change, copy):
    change(copy)
    journal = (copy / "run" / "journal.jsonl").read_bytes()
    assert_one_error(run_forked(arguments(copy, copy / "run")), 2, *CHANGES[change])
    assert (copy / "run" / "journal.jsonl").read_bytes() == journal


def test_files_may_move(copy):
    run_forked_well(arguments(copy, copy / "run"))
    assert end(copy / "run").digest == end(copy / "undisturbed").digest
