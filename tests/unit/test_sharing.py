"""What of a run's facts may be shared."""

from __future__ import annotations

import pytest

from lezo_ds.runs.sharing import private_paths, shared_command, shared_config, shared_environment, shared_path


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("facebook/opt-13b", "facebook/opt-13b"),
        ("runs/demo/assets/SmolLM2-135M-Instruct", "runs/demo/assets/SmolLM2-135M-Instruct"),
        ("/data/alice/model", "model"),
        ("~alice/model", "model"),
        ("../alice/model", "model"),
        ("https://alice:hf_secret@example.org/model", "model"),
        ("/", ""),
    ],
)
def test_of_a_path_outside_the_working_directory_only_its_name_is_shared(path, shared):
    assert shared_path(path) == shared


def test_a_command_keeps_the_recipe_and_its_changes_and_no_other_word():
    words = [
        "/data/alice/own_loop.py",
        "--config",
        "/data/alice/mine.yaml",
        "zo.learning_rate=1e-6",
        "--dry-run",
    ]
    words += ["model.path=/data/alice/m", "HF_TOKEN=hf_secret", "--hub_token", "hf_secret", "--wandb=secret"]
    words += ["zo.update_rule_options.weight_decay=0.1", "secret"]
    shared = ["own_loop.py", "--config", "mine.yaml", "zo.learning_rate=1e-6", "--dry-run", "model.path=m"]
    shared += ["..."] * 4 + ["zo.update_rule_options.weight_decay=0.1", "..."]
    assert shared_command(words) == shared


def test_keys_that_are_given_as_options_are_kept_like_others():
    words = [
        "train.py",
        "--seed",
        "-1",
        "--model.path",
        "/data/alice/m",
        "--hub.token",
        "hf_x",
        "--hub_token",
    ]
    shared = ["train.py", "seed=-1", "model.path=m", "...", "...", "..."]
    assert shared_command([*words, "hf_x"]) == shared


def test_an_environment_keeps_what_it_says_of_the_software_and_the_hardware():
    known = {"versions": {"torch": "2"}, "hardware": {"gpu": None}, "platform": "Linux", "world_size": 2}
    recorded = known | {"command": ["python", "/data/alice/train.py", "secret"], "user": "alice"}
    assert shared_environment(recorded) == known | {"command": ["python", "train.py", "..."]}
    for malformed in ("secret", ["secret"], ["python", 1], {"secret": 1}):
        assert shared_environment(known | {"command": malformed}) == known


def test_a_config_keeps_all_values_but_the_places_of_its_paths():
    config = {"run_dir": "/data/alice/run", "seed": 3, "deepspeed": None, "data": {"path": "data", "seed": 0}}
    assert shared_config(config | {"model": {"path": "/data/alice/m", "dtype": "bf16"}}) == {
        **config,
        "run_dir": "run",
        "model": {"path": "m", "dtype": "bf16"},
    }
    assert private_paths(config) == ["run_dir=/data/alice/run"]
