"""The recipes of the paper's tables: as the table of hyperparameters has them, and fit to run."""

from __future__ import annotations

import re

import pytest
from assets import REPOSITORY

from lezo_ds.config import TRAINED, ZEROTH_ORDER, check_world, load_config, num_dropped
from lezo_ds.ds_config import load_ds_config
from lezo_ds.errors import UserError
from lezo_ds.recipes.paper import MODELS, SCORES, TASKS, Cell, hyperparameters
from lezo_ds.recipes.registry import recipe_name, write_recipes
from lezo_ds.tools.planning.dry_run import describe_plan

DIRECTORY = REPOSITORY / "launch" / "recipes"
CELLS = list(SCORES)


@pytest.fixture
def in_the_root(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def path_of(cell):
    return DIRECTORY / f"{recipe_name(cell)}.yaml"


def num_gpus(cell):
    command = (
        rf"deepspeed --num_gpus (\d+) launch/train.py --config launch/recipes/{recipe_name(cell)}\.yaml\n"
    )
    return int(re.search(command, path_of(cell).read_text()).group(1))


def test_writing_the_recipes_again_changes_nothing(tmp_path):
    assert write_recipes(tmp_path) == len(CELLS)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(written) == len(CELLS), "two cells have one name"
    assert written == {path.name: path.read_text() for path in DIRECTORY.glob("opt-*.yaml")}


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="directory of the recipes does not exist"):
        write_recipes(tmp_path / "none")


@pytest.mark.parametrize("cell", CELLS, ids=recipe_name)
def test_a_recipe_has_a_plan_on_the_gpus_its_head_names(cell, in_the_root):
    """Model and data lie on the hub: without it they cannot be checked, and nothing else may be left open."""
    config, world_size = load_config(path_of(cell), []), num_gpus(cell)
    plan = describe_plan(config, world_size)
    assert plan.count("not checked") == 1
    open_questions = plan.partition("not checked")[2].splitlines()
    assert [
        line for line in open_questions if "Hugging Face hub" not in line and "facebook/" not in line
    ] == []
    assert len(open_questions) == 2
    assert f"run directory   runs/{recipe_name(cell)}" in plan
    assert (f"ranks           {world_size}, " in plan) == (cell.method in TRAINED)


@pytest.mark.parametrize("cell", CELLS, ids=recipe_name)
def test_a_recipe_asks_for_its_cell(cell, in_the_root):
    config = load_config(path_of(cell), [])
    assert config.model.path == f"facebook/{cell.model}"
    assert (config.data.task, config.data.protocol) == (cell.task, "mezo")
    assert (config.method, config.peft.kind) == (cell.method, cell.peft)
    assert config.run_dir == f"runs/{recipe_name(cell)}"
    micro, dtype = config.train.micro_batch_size, config.model.dtype
    assert load_ds_config(config.deepspeed, dtype, num_gpus(cell), micro)[dtype] == {"enabled": True}


@pytest.mark.parametrize("cell", [c for c in CELLS if c.method in ZEROTH_ORDER], ids=recipe_name)
def test_a_zeroth_order_recipe_has_the_papers_hyperparameters(cell):
    config, asked = load_config(path_of(cell), []), hyperparameters(cell)
    assert config.zo.learning_rate == asked.learning_rates[0]
    assert config.zo.perturbation_scale == asked.perturbation_scale
    dropped = {"opt-1.3b": 18, "opt-13b": 20 if cell.peft == "lora" else 30, "opt-30b": 36}[cell.model]
    expected = dropped if cell.method == "lezo" else 0
    assert num_dropped(config.zo, MODELS[cell.model].num_blocks) == expected
    assert (config.train.steps, config.train.eval_every, config.train.batch_size) == (20_000, 2_000, 16)
    check_world(config, num_gpus(cell))


@pytest.mark.parametrize("task", ["sst2", "squad"])
def test_a_peft_recipe_has_the_papers_sizes(task):
    lora = load_config(path_of(Cell("opt-13b", task, "lezo", "lora")), []).peft
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_targets) == (8, 16.0, "q_proj,v_proj")
    assert load_config(path_of(Cell("opt-13b", task, "mezo", "prefix")), []).peft.prefix_length == 5


def test_an_adamw_recipe_runs_for_five_epochs_of_batches_of_eight():
    config = load_config(path_of(Cell("opt-13b", "cb", "adamw")), [])
    assert (config.adamw.learning_rate, config.adamw.weight_decay, config.adamw.epochs) == (1e-5, 0, 5)
    assert (config.train.steps, config.train.eval_every, config.train.batch_size) == (None, None, 8)
    check_world(config, 8)


def test_in_context_learning_shows_32_demonstrations():
    config = load_config(path_of(Cell("opt-13b", "cb", "icl")), [])
    assert config.data.num_demonstrations == 32


@pytest.mark.parametrize("cell", CELLS, ids=recipe_name)
def test_the_head_of_a_recipe_says_what_the_paper_reports_and_that_it_was_not_run(cell):
    head = " ".join(
        line.removeprefix("# ").strip() for line in path_of(cell).read_text().splitlines() if line[:1] == "#"
    )
    score = SCORES[cell]
    deviation = "" if score.deviation is None else f" +- {score.deviation}"
    metric = "token F1" if cell.task in ("squad", "drop") else "accuracy"
    assert f"Expected: test {metric} {score.mean}{deviation}% (" in head
    assert "we have NOT run this recipe on this hardware" in head
    assert TASKS[cell.task].title in head
    assert "Hardware: " in head


def test_the_head_names_the_memory_of_the_weights_and_the_body_what_fits_beside_them():
    two = path_of(Cell("opt-30b", "sst2", "lezo")).read_text()
    four = path_of(Cell("opt-30b", "boolq", "lezo")).read_text()
    assert "30.0 GB of fp16 weights on each of the two" in two
    assert "update_precision: stochastic" in two
    assert "15.0 GB of fp16 weights and as much of low bits" in four
    assert "update_precision: fp32_master" in four
