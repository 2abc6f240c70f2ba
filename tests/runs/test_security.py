"""What a model, a recipe or a data set brings along is never executed, through the real command.

Each payload, run as its format's unsafe reader would run it, makes a file; so it would be seen.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from assets import REPOSITORY, write_recipe
from commands import assert_one_error, run_forked, run_forked_well
from safetensors.torch import load_file

from lezo_ds.journal import Journal, read_journal


class Payload:
    """Unpickling it makes a directory."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.mkdir, (self.target,)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("source")).parent


@pytest.fixture
def inputs(source, tmp_path):
    """A model, data and a recipe, to be spoilt."""
    return shutil.copytree(source, tmp_path / "inputs")


@pytest.fixture
def target(tmp_path):
    """What a payload that was executed has made."""
    return tmp_path / "executed"


def train(inputs, *overrides, recipe=None):
    own = [f"model.path={inputs / 'model'}", f"data.path={inputs / 'data'}", f"run_dir={inputs / 'run'}"]
    return run_forked(["--config", recipe or inputs / "recipe.yaml", *own, "train.steps=1", *overrides])


def make_code(directory, name, target):
    (directory / f"{name}.py").write_text(f"import pathlib\npathlib.Path({str(target)!r}).mkdir()\n")


def test_a_pickle_with_a_payload_in_place_of_weights_is_refused(inputs, target, monkeypatch):
    weights = inputs / "model" / "model.safetensors"
    torch.save({**load_file(weights), "extra": Payload(target)}, weights.with_name("pytorch_model.bin"))
    weights.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(inputs / "cache"))
    assert_one_error(train(inputs), 2, "pytorch_model.bin cannot be read as plain tensors", "safetensors")
    assert not target.exists()
    pickle.loads(pickle.dumps(Payload(target)))
    assert target.exists()


def test_a_pickle_beside_safetensors_is_not_opened(inputs, target):
    (inputs / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(target)))
    finished = train(inputs)
    assert finished.code == 0, finished.err[-5000:]
    assert not target.exists()


@pytest.mark.parametrize("way", ["recipe", "override"])
def test_a_tag_in_yaml_makes_no_object(way, inputs, target):
    text = f"!!python/object/apply:os.mkdir [{target}]"
    recipe = inputs / "evil.yaml"
    recipe.write_text((inputs / "recipe.yaml").read_text() + (f"seed: {text}\n" if way == "recipe" else ""))
    given = [f"seed={text}"] if way == "override" else []
    assert_one_error(train(inputs, *given, recipe=recipe), 2, "python/object/apply")
    assert not target.exists()
    yaml.unsafe_load(text)
    assert target.exists()


def test_aliases_of_aliases_in_yaml_are_refused(inputs):
    """With them, a few lines stand for more values than fit in memory."""
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    recipe = inputs / "evil.yaml"
    recipe.write_text((inputs / "recipe.yaml").read_text() + "\n".join(lines))
    assert_one_error(train(inputs, recipe=recipe), 2, "is not valid YAML", "more than 10000 values")


def test_code_that_a_model_asks_for_is_refused(inputs, target):
    directory = inputs / "model"
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (directory / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    make_code(directory, "evil", target)
    assert_one_error(train(inputs), 2, "cannot load the tokenizer of", str(directory))
    assert not target.exists()


def test_code_that_a_known_model_and_its_tokenizer_bring_along_is_not_run(inputs, target):
    directory = inputs / "model"
    make_code(directory, "evil", target)
    added = {
        "config.json": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "tokenizer_config.json": {"AutoTokenizer": ["evil.Slow", "evil.Fast"]},
    }
    for file, auto_map in added.items():
        values = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps({**values, "auto_map": auto_map}))
    finished = train(inputs)
    assert finished.code == 0, finished.err[-5000:]
    assert not target.exists()
    assert not list((inputs / "run").rglob("*.py"))


def test_code_on_the_hub_that_a_known_model_names_is_refused(inputs):
    """Some transformers 5 download such a kernel and run it, if the package kernels is installed."""
    file = inputs / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attn_implementation": "evil/kernel"}))
    assert_one_error(train(inputs), 2, "names code on the hub", "attn_implementation evil/kernel")


def test_the_module_that_an_untrusted_run_names_is_not_imported(inputs, target):
    assert train(inputs).code == 0
    run_dir = inputs / "run"
    header, records = read_journal(run_dir / "journal.jsonl")
    named = {**header.config, "train": {**header.config["train"], "objective": "evil:loss"}}
    (run_dir / "journal.jsonl").unlink()
    with Journal.create(run_dir / "journal.jsonl", replace(header, config=named)) as journal:
        for record in records:
            journal.append(record)
    recorded = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(recorded.replace("objective: task", "objective: evil:loss"))
    make_code(inputs, "evil", target)
    path, of_run = f"{REPOSITORY}{os.pathsep}{inputs}", ["--run", run_dir, "--step", "last"]
    run_forked_well([run_dir], program="report.py", PYTHONPATH=path)
    run_forked_well([*of_run, "--out", inputs / "exported"], program="export.py", PYTHONPATH=path)
    refused = run_forked(of_run, program="evaluate.py", PYTHONPATH=path)
    assert_one_error(refused, 2, "train.objective=evil:loss of the run is in a module")
    assert not target.exists()
    asked = [*of_run, "train.objective=evil:loss"]
    assert run_forked(asked, program="evaluate.py", PYTHONPATH=path).code == 2  # the module has no loss
    assert target.exists()


def test_a_script_beside_the_data_is_not_run(inputs, target):
    make_code(inputs / "data", "data", target)
    make_code(inputs / "data", "sst2", target)
    finished = train(inputs)
    assert finished.code == 0, finished.err[-5000:]
    assert not target.exists()


def test_trusting_remote_code_is_not_an_option(inputs):
    for key in ("trust_remote_code", "model.trust_remote_code", "data.trust_remote_code"):
        assert_one_error(train(inputs, f"{key}=true"), 2, "unknown key", key)
