"""Recipes by name: they follow the paper's table of hyperparameters, can be run, and are printed as YAML."""

from __future__ import annotations

import re

import pytest
import yaml
from assets import REPOSITORY
from commands import assert_refused, python, run_well

from lezo_ds.config import TRAINED, ZEROTH_ORDER, check_world, config_to_dict, load_config, num_dropped
from lezo_ds.config.deepspeed import load_ds_config
from lezo_ds.errors import UserError
from lezo_ds.recipes import RECIPES, list_recipes, load_recipe, recipe_text
from lezo_ds.recipes.paper import PAPER_MODELS, PAPER_SCORES, PAPER_TASKS, Experiment, hyperparameters
from lezo_ds.recipes.paper_recipes import recipe_name
from lezo_ds.recipes.recipe import Recipe

EXPERIMENTS = list(PAPER_SCORES)
ONE_OF_EACH_KIND = {(e.model, e.method, e.peft): e for e in EXPERIMENTS}.values()
DEMO = str(REPOSITORY / "launch" / "recipes" / "demo.yaml")


@pytest.fixture
def in_the_root(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def num_gpus(experiment):
    command = rf"# Command:  deepspeed --num_gpus (\d+) launch/train.py --config {recipe_name(experiment)}\n"
    return int(re.search(command, recipe_text(recipe_name(experiment))).group(1))


def config_of(experiment):
    return load_recipe(recipe_name(experiment))


def test_every_row_of_the_papers_tables_is_a_recipe():
    assert len({recipe_name(experiment) for experiment in EXPERIMENTS}) == len(EXPERIMENTS)
    assert RECIPES.keys() == {recipe_name(experiment) for experiment in EXPERIMENTS}


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=recipe_name)
def test_a_recipe_is_its_experiment_and_its_text_says_so(experiment, in_the_root, tmp_path):
    config, text = config_of(experiment), recipe_text(recipe_name(experiment))
    assert config.model.path == f"facebook/{experiment.model}"
    assert (config.data.task, config.data.protocol) == (experiment.task, "mezo")
    assert (config.method, config.peft.kind) == (experiment.method, experiment.peft)
    assert config.run_dir == f"runs/{recipe_name(experiment)}"
    micro, dtype, ranks = config.train.micro_batch_size, config.model.dtype, num_gpus(experiment)
    assert load_ds_config(config.deepspeed, dtype, ranks, micro)[dtype] == {"enabled": True}
    if experiment.method in TRAINED:
        check_world(config, ranks)

    (tmp_path / "saved.yaml").write_text(text)
    assert load_config(tmp_path / "saved.yaml", []) == config
    head = " ".join(line.removeprefix("# ").strip() for line in text.splitlines() if line.startswith("#"))
    score = PAPER_SCORES[experiment]
    deviation = "" if score.deviation is None else f" +- {score.deviation}"
    metric = "token F1" if experiment.task in ("squad", "drop") else "accuracy"
    assert f"Expected: test {metric} {score.mean}{deviation}% (" in head
    assert "we have NOT run this recipe on this hardware" in head
    assert PAPER_TASKS[experiment.task].title in head
    assert "Hardware: " in head


def test_a_zeroth_order_recipe_has_the_papers_hyperparameters():
    for experiment in EXPERIMENTS:
        if experiment.method not in ZEROTH_ORDER:
            continue
        config, asked = config_of(experiment), hyperparameters(experiment)
        assert config.zo.learning_rate == asked.learning_rates[0]
        assert config.zo.perturbation_scale == asked.perturbation_scale
        dropped = {"opt-1.3b": 18, "opt-13b": 20 if experiment.peft == "lora" else 30, "opt-30b": 36}
        expected = dropped[experiment.model] if experiment.method == "lezo" else 0
        assert num_dropped(config.zo, PAPER_MODELS[experiment.model].num_blocks) == expected
        assert (config.train.steps, config.train.eval_every, config.train.batch_size) == (20_000, 2_000, 16)


def test_other_methods_have_the_papers_settings():
    lora = config_of(Experiment("opt-13b", "squad", "lezo", "lora")).peft
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_targets) == (8, 16.0, "q_proj,v_proj")
    assert config_of(Experiment("opt-13b", "sst2", "mezo", "prefix")).peft.prefix_length == 5
    adamw = config_of(Experiment("opt-13b", "cb", "adamw"))
    assert (adamw.adamw.learning_rate, adamw.adamw.weight_decay, adamw.adamw.epochs) == (1e-5, 0, 5)
    assert (adamw.train.steps, adamw.train.eval_every, adamw.train.batch_size) == (None, None, 8)
    assert config_of(Experiment("opt-13b", "cb", "icl")).data.num_demonstrations == 32


def test_low_bits_are_kept_where_they_fit():
    two = recipe_text("opt-30b-sst2-lezo")
    assert "update_precision: stochastic  # fp32_master needs 60 GB more, summed over all ranks" in two
    assert load_recipe("opt-30b-boolq-lezo").zo.update_precision == "fp32_master"


def test_overrides_are_part_of_the_text_and_comments_on_their_keys_are_not():
    overrides = ["zo.sparsity=0.5", "run_dir=runs/half"]
    text = recipe_text("opt-13b-sst2-lezo", overrides)
    assert "--config opt-13b-sst2-lezo zo.sparsity=0.5 run_dir=runs/half\n" in text
    assert "# Changed:  zo.sparsity=0.5, run_dir=runs/half. What follows is about the recipe without" in text
    assert "  sparsity: 0.5\n" in text
    assert "  learning_rate: 1.0e-06  # searched: 1e-6, 7e-7\n" in text
    config = load_recipe("opt-13b-sst2-lezo", overrides)
    assert yaml.safe_load(text) == config_to_dict(config)
    assert (config.zo.sparsity, config.run_dir) == (0.5, "runs/half")


def test_a_file_is_a_recipe_too():
    assert load_recipe(DEMO, ["seed=3"]).seed == 3
    text = recipe_text(DEMO, ["seed=3"])
    assert text.startswith(f"# {DEMO} and the command line\nrun_dir: ")
    assert yaml.safe_load(text) == config_to_dict(load_recipe(DEMO, ["seed=3"]))


@pytest.mark.parametrize("name", ["demo"])
def test_a_shipped_file_is_a_recipe_from_any_folder_by_its_name_and_path(name, tmp_path, monkeypatch):
    here = load_recipe(str(REPOSITORY / "launch" / "recipes" / f"{name}.yaml"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()  # a folder of that name is no file
    assert load_recipe(name) == load_recipe(f"launch/recipes/{name}.yaml") == here
    assert yaml.safe_load(recipe_text(name)) == config_to_dict(here)
    assert re.search(rf"^{name} +The demonstration: LeZO on ", list_recipes(), re.MULTILINE)


def test_outside_a_clone_the_command_of_a_recipe_names_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "# Command:  deepspeed --num_gpus 2 --module lezo_ds train --config opt-13b-sst2-lezo seed=3\n"
    assert command in recipe_text("opt-13b-sst2-lezo", ["seed=3"])


def test_a_new_recipe_is_one_entry(monkeypatch):
    values = {"run_dir": "r", "model.path": "m", "model.dtype": "fp32", "method": "zero_shot"}
    mine = Recipe(
        title="Mine", values=values, notes={"model.path": "mine"}, num_gpus=1, about={"Time": "1 s"}
    )
    monkeypatch.setitem(RECIPES, "mine", lambda: mine)
    assert load_recipe("mine").model.path == "m"
    text = recipe_text("mine")
    assert text.startswith(
        "# Mine.\n#\n# Command:  deepspeed --num_gpus 1 launch/train.py --config mine\n# Time:"
    )
    assert "  path: m  # mine\n" in text
    assert list_recipes().splitlines()[-1].split() == ["mine", "Mine"]


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("opt-13b-sst-lezo", "did you mean opt-13b-sst2-lezo or "),
        ("OPT-13B-SST2-LEZO", "did you mean opt-13b-sst2-lezo or "),
        ("nonsense", "lezo-ds train --list-recipes lists them"),
    ],
)
def test_an_unknown_name_is_refused(name, fix):
    with pytest.raises(UserError) as caught:
        load_recipe(name)
    assert str(caught.value).startswith(f"there is no recipe of this name, and no such file; got: {name}; ")
    assert f"fix: {fix}" in str(caught.value)


def test_the_command_prints_and_lists_recipes():
    text = recipe_text("opt-13b-sst2-lezo", ["seed=2"])
    assert run_well(python("--config", "opt-13b-sst2-lezo", "--print-config", "seed=2")).out == text
    assert run_well(python("--list-recipes")).out.splitlines() == list_recipes().splitlines()
    assert_refused(python("--config", "opt-13b-sst-lezo"), "did you mean opt-13b-sst2-lezo")
