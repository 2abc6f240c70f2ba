"""Paths in recipes and on command lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lezo_ds.config import check_overrides, config_from_dict, config_to_dict, load_config
from lezo_ds.config.paths import PATH_KEYS, expand, with_places
from lezo_ds.errors import UserError

BARE = {
    "run_dir": "runs/x",
    "model": {"path": "facebook/opt-1.3b", "dtype": "bf16"},
    "zo": {"learning_rate": 1e-6, "sparsity": 0.75},
    "train": {"steps": 100},
}


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    """A working directory with a folder of recipes, which holds some data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/people/ann")
    monkeypatch.setenv("DATA", "/data/ann")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)
    for name in ("recipes/data", "recipes/runs/x", "models/tiny", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "recipes" / "mine.csv").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("~/x", "/people/ann/x"),
        ("a~/x", "a~/x"),
        ("$DATA/x", "/data/ann/x"),
        ("${DATA}x/$HOME", "/data/annx//people/ann"),
        ("facebook/opt-13b", "facebook/opt-13b"),
        ("costs 5$", "costs 5$"),
    ],
)
def test_home_directories_and_variables_are_expanded(given, expected):
    assert expand(given, "data.path") == expected


@pytest.mark.parametrize("given", ["$UNSET/x", "${UNSET}/x", "x/$EMPTY", "~no-such-user/x"])
def test_what_cannot_be_expanded_is_refused_with_its_key(given):
    messages = []
    for refuse in (
        lambda: config_from_dict(BARE | {"data": {"path": given}}, "mine.yaml"),
        lambda: config_from_dict(BARE, "mine.yaml", [f"data.path={given}"]),
        lambda: check_overrides([f"data.path={given}"]),
        lambda: load_config(given),
    ):
        with pytest.raises(UserError) as caught:
            refuse()
        messages.append(str(caught.value))
    assert all(f"got: {given}; expected: " in message for message in messages)
    assert [message.split()[0] for message in messages] == ["data.path", "data.path", "data.path", "--config"]


@pytest.mark.parametrize(
    ("given", "in_recipe", "on_command_line"),
    [
        ("./mine.csv", "recipes/mine.csv", "{here}/mine.csv"),
        ("./recipes/mine.csv", "{here}/recipes/recipes/mine.csv", "recipes/mine.csv"),
        ("./facebook/opt-13b", "{here}/recipes/facebook/opt-13b", "{here}/facebook/opt-13b"),
        ("../models/tiny", "models/tiny", "{parent}/models/tiny"),
        ("mine.csv", "recipes/mine.csv", "mine.csv"),
        ("data", "recipes/data", "data"),
        ("models/tiny", "models/tiny", "models/tiny"),
        ("zero3_bf16", "zero3_bf16", "zero3_bf16"),
        ("facebook/opt-13b", "facebook/opt-13b", "facebook/opt-13b"),
        ("owner/name:train", "owner/name:train", "owner/name:train"),
        ("/data/x", "/data/x", "/data/x"),
        ("..", "{here}", "{parent}"),
        ("x\0", "x\0", "x\0"),
    ],
)
@pytest.mark.parametrize("key", [key for key in PATH_KEYS if key != "run_dir"])
def test_a_path_in_a_recipe_is_taken_from_its_folder_if_it_says_so_or_exists_there(
    key, given, in_recipe, on_command_line, tmp_path
):
    places = {"here": tmp_path, "parent": tmp_path.parent}
    found = with_places({key: given}, "mine.yaml", Path("recipes"))
    assert found == {key: in_recipe.format(**places)}
    assert with_places({key: given}, "the command line") == {key: on_command_line.format(**places)}


def test_a_run_directory_is_taken_from_the_recipes_folder_only_if_it_says_so():
    assert with_places({"run_dir": "runs/x"}, "mine.yaml", Path("recipes")) == {"run_dir": "runs/x"}
    assert with_places({"run_dir": "./runs/x"}, "mine.yaml", Path("recipes")) == {"run_dir": "recipes/runs/x"}


def test_no_other_key_is_changed():
    values = {"data.prompt": "./{text} costs $UNSET ~", "seed": 3, "data.train": None}
    assert with_places(values, "mine.yaml", Path("recipes")) == values


def test_the_configuration_of_a_run_names_the_same_files_as_its_recipe(tmp_path, monkeypatch):
    values = BARE | {"data": {"train": "mine.csv", "prompt": "{a}", "completion": "{b}"}}
    values |= {"model": {"path": "../models/tiny", "dtype": "fp32"}, "run_dir": "./runs/x"}
    (tmp_path / "recipes" / "r.yaml").write_text(yaml.safe_dump(values))
    recorded = Path("recipes/runs/x/config.yaml")
    config = load_config(Path("recipes/r.yaml"), ["data.test=./recipes/mine.csv"])
    recorded.write_text(yaml.safe_dump(config_to_dict(config)))
    assert load_config(recorded, []) == config
    monkeypatch.chdir(tmp_path / "elsewhere")
    from_elsewhere = load_config(Path("../recipes/r.yaml"), ["data.test=../recipes/mine.csv"])
    for before, after in (
        (config.data.train, from_elsewhere.data.train),
        (config.data.test, from_elsewhere.data.test),
        (config.model.path, from_elsewhere.model.path),
        (config.run_dir, from_elsewhere.run_dir),
    ):
        assert after == str(tmp_path / before)


def test_what_a_run_recorded_stays_as_it_is():
    values = BARE | {"data": {"path": "../$UNSET/~"}}
    config = config_from_dict(values, "run x", recorded=True)
    assert config.data.path == "../$UNSET/~"
    assert config_from_dict(values, "run x", ["data.path=$DATA"], recorded=True).data.path == "/data/ann"
