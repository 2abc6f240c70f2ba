"""What a model, a recipe or a data set brings along is never executed, through the real command.

Each payload, run as its format's unsafe reader would run it, makes a file; so it would be seen.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from assets import write_recipe
from commands import assert_one_error
from faults import run_forked
from safetensors.torch import load_file


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


def test_a_script_beside_the_data_is_not_run(inputs, target):
    make_code(inputs / "data", "data", target)
    make_code(inputs / "data", "sst2", target)
    finished = train(inputs)
    assert finished.code == 0, finished.err[-5000:]
    assert not target.exists()


def test_trusting_remote_code_is_not_an_option(inputs):
    for key in ("trust_remote_code", "model.trust_remote_code", "data.trust_remote_code"):
        assert_one_error(train(inputs, f"{key}=true"), 2, "unknown key", key)
