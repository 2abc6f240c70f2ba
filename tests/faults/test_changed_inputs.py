"""Data or a model that change between a kill and the resumption are refused. Files may move."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
from assets import write_recipe
from commands import assert_one_error, run_forked, run_forked_well, wait_until
from run_ends import STEP, end, reaches

LENGTH = ["train.steps=12", "train.eval_every=12", "train.snapshot_every=0"]


@pytest.fixture(scope="module")
def halted(tmp_path_factory):
    """A run that was killed, with its model, data and recipe in one directory; and its undisturbed end."""
    root = tmp_path_factory.mktemp("halted")
    write_recipe(root)
    run_forked_well(arguments(root, root / "undisturbed"))

    def kill(ranks):
        wait_until(lambda: reaches(root / "run", STEP, 4), ranks[0])
        ranks[0].kill()

    assert run_forked(arguments(root, root / "run"), meanwhile=kill).code == -signal.SIGKILL
    return root


@pytest.fixture
def copy(halted, tmp_path):
    """A copy of all of it, in another place."""
    return shutil.copytree(halted, tmp_path / "copy")


def arguments(root, run_dir, *more):
    inputs = [f"model.path={root / 'model'}", f"data.path={root / 'data'}"]
    return ["--config", root / "recipe.yaml", f"run_dir={run_dir}", *inputs, *LENGTH, *more]


def change_lines(path, change):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in change(records)))


def in_another_order(root):
    change_lines(root / "data" / "train.jsonl", lambda records: records[::-1])


def with_other_labels(root):
    def flip(records):
        return [record | {"label": 1 - record["label"]} for record in records]

    change_lines(root / "data" / "validation.jsonl", flip)


def with_another_activation(root):
    path = root / "model" / "config.json"
    values = json.loads(path.read_text())
    assert values["activation_function"] == "relu"
    path.write_text(json.dumps(values | {"activation_function": "gelu"}))


CHANGES = {
    "train.jsonl": (in_another_order, "the fingerprint of the dev split of sst2 in {root}/data"),
    "labels": (with_other_labels, "the fingerprint of the test split of sst2 in {root}/data"),
    "config.json": (
        with_another_activation,
        "activation_function in {root}/model/config.json differs from the journal's; got: 'gelu'; "
        "expected: 'relu'",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_input_that_has_changed_is_refused_with_both_values(name, copy):
    change, fragment = CHANGES[name]
    change(copy)
    journal = (copy / "run" / "journal.jsonl").read_bytes()
    fragments = [fragment.format(root=copy), "got: '", "expected: '"]
    assert_one_error(run_forked(arguments(copy, copy / "run")), 2, *fragments)
    assert (copy / "run" / "journal.jsonl").read_bytes() == journal


def test_weights_are_not_exported_with_another_config_and_need_no_data(copy):
    shutil.rmtree(copy / "data")
    given = ["--run", copy / "run", "--step", "last", f"model.path={copy / 'model'}"]
    run_forked_well([*given, "--out", copy / "exported"], program="export.py")
    with_another_activation(copy)
    refused = run_forked([*given, "--out", copy / "other"], program="export.py")
    fragment = f"activation_function in {copy}/model/config.json differs from the run's; got: 'gelu'"
    assert_one_error(refused, 2, fragment, "expected: 'relu'")


def test_files_may_move(copy):
    (copy / "data" / "notes.txt").write_text("not data")
    path = copy / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_name_or_path": "elsewhere"}, indent=4))
    run_forked_well(arguments(copy, copy / "run"))
    resumed, undisturbed = end(copy / "run"), end(copy / "undisturbed")
    assert (resumed.journal, resumed.digest) == (undisturbed.journal, undisturbed.digest)
