"""--dry-run: the plan of a run, from all that can be known before weights load."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from assets import NUM_BLOCKS, write_data, write_recipe
from commands import deepspeed, mpirun, python, run, run_well

from lezo_ds.config import load_config
from lezo_ds.errors import UserError
from lezo_ds.tools.planning.dry_run import describe_plan
from lezo_ds.tools.planning.model_sizes import model_sizes


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe whose model has no weights: a dry run needs none."""
    directory = tmp_path_factory.mktemp("assets")
    path = write_recipe(directory)
    (directory / "model" / "model.safetensors").unlink()
    return path


def facts(text):
    """Return the lines of a plan below each of its headings."""
    found, heading = {}, ""
    for line in text.splitlines():
        heading = line[:15].strip() or heading
        found.setdefault(heading, []).append(line[16:])
    return found


def test_a_local_recipe_is_checked_whole_and_its_plan_printed(recipe, tmp_path):
    printed = run_well(python("--config", recipe, f"run_dir={tmp_path / 'run'}", "--dry-run"))
    plan = facts(printed.out)
    (on_gpu, on_cpu) = plan.pop("memory a rank")
    plan = {heading: line for heading, (line,) in plan.items()}
    assert "not checked" not in plan
    assert plan["run directory"] == str(tmp_path / "run")
    assert plan["ranks"] == "1, each with 4 of a step's 4 micro-batches of 2 examples"
    assert plan["steps"] == "8, evaluated every 4"
    assert plan["optimizer"].startswith("learning rate 0.001, perturbation scale 0.001, estimator spsa")
    assert "OPTForCausalLM" in plan["model"]
    assert plan["blocks"] == f"{NUM_BLOCKS} in model.decoder.layers, {NUM_BLOCKS // 2} dropped per step"
    assert re.fullmatch(r"at most \d+ tokens \(measured in the data\)", plan["inputs"])
    assert re.fullmatch(r"on a GPU [\d.]+ GiB: shards .*, reserve 2\.00, .*", on_gpu)
    assert re.fullmatch(r"on CPUs, as here, [\d.]+ GiB: shards .*, reserve 0\.53, .*", on_cpu)
    assert plan["data"] == "sst2, protocol clean: 30 train, 11 dev, 13 test"
    assert re.fullmatch(r'"[^"]+" -> "[^"]+"', plan["first example"])
    tokens = r"[\d.]+ per example, padding included; [\d.]+ if each had a row of its own"
    assert re.fullmatch(tokens, plan["tokens"])
    assert not list(tmp_path.iterdir())


def test_what_is_on_the_hub_is_listed_as_not_checked_but_the_memory_of_opt_is_known():
    plan = facts(run_well(python("--config", "opt-30b-sst2-lezo", "--dry-run")).out)
    assert plan["steps"] == ["20000, evaluated every 2000"]
    model, data = plan["not checked"]
    assert "facebook/opt-" in model
    assert "nyu-mll/glue" in data
    assert ": shards 55.83, reserve 2.00, copies 2.30" in plan["memory a rank"][0]


@pytest.mark.parametrize(
    ("overrides", "method"),
    [
        (["method=zero_shot"], "zero_shot, trains nothing"),
        (["method=icl", "data.num_demonstrations=2", "data.max_length=64"], "icl, trains nothing"),
        (["method=mezo", "zo.sparsity=0"], "mezo, trains all weights"),
        (["peft.kind=lora"], "lezo, trains lora"),
        (
            ["method=adamw", "train.steps=null", "train.eval_every=null", "zo.learning_rate=null"],
            "adamw, trains all weights",
        ),
    ],
)
def test_every_method_has_a_plan_with_its_memory(overrides, method, recipe):
    config = load_config(recipe, ["run_dir=none", "model.dtype=bf16", *overrides])
    plan = facts(describe_plan(config, 1))
    assert plan["method"] == [method]
    assert ("optimizer" in plan) == ("nothing" not in method)
    assert plan.get("steps", [""])[0].startswith("5 epochs, evaluated every tenth") == ("adamw" in method)
    total = int(re.search(r"([\d,]+) parameters", plan["model"][0]).group(1).replace(",", ""))
    assert f"shards {2 * total / 2**30:.2f}" in plan["memory a rank"][0]


def test_the_plan_of_a_large_model_needs_only_its_config(tmp_path, recipe):
    model = shutil.copytree(recipe.parent / "model", tmp_path / "model")
    config = {"model_type": "opt", "vocab_size": 50272, "num_hidden_layers": 48, "hidden_size": 7168}
    config |= {"ffn_dim": 28672, "num_attention_heads": 56, "word_embed_proj_dim": 7168}
    (model / "config.json").write_text(json.dumps(config))
    data = write_data(tmp_path / "data", num_train=1600)
    overrides = [f"model.path={model}", f"data.path={data}"]
    command = python("--config", "opt-30b-sst2-lezo", "--dry-run", *overrides)
    plan = facts(run_well(command).out)
    assert "not checked" not in plan
    assert plan["blocks"] == ["48 in model.decoder.layers, 36 dropped per step"]
    assert ": shards 55.83, " in plan["memory a rank"][0]
    assert plan["data"] == ["sst2, protocol mezo: 1000 train, 500 dev, 30 test"]


@pytest.mark.parametrize("override", ["zo.only_blocks=true", "peft.kind=lora", "peft.kind=prefix"])
def test_a_run_that_drops_all_that_it_trains_is_refused(override, recipe):
    config = load_config(recipe, ["run_dir=none", "zo.sparsity=1", override])
    with pytest.raises(UserError, match=r"nothing is left to train: .* zo.only_blocks=false"):
        describe_plan(config, world_size=1)


def test_an_adapter_outside_the_blocks_is_refused_if_only_blocks_are_trained(recipe):
    overrides = ["run_dir=none", "zo.only_blocks=true", "peft.kind=lora", "peft.lora_targets=lm_head"]
    with pytest.raises(UserError, match=r"zo\.only_blocks leaves nothing to train"):
        describe_plan(load_config(recipe, overrides), world_size=1)


def test_weights_outside_the_blocks_do_not_count_as_trained_if_only_blocks_are(recipe):
    overrides = ["run_dir=none", "model.dtype=bf16", "zo.only_blocks=true"]
    config = load_config(recipe, overrides)
    plan = facts(describe_plan(config, world_size=1))
    assert plan["method"][0].endswith("trains all weights of the blocks")
    sizes = model_sizes(config), model_sizes(load_config(recipe, overrides[:2]))
    assert [size.trains_outside for size in sizes] == [False, True]
    assert sizes[0].num_trained < sizes[1].num_trained == sizes[0].num_parameters
    assert sizes[0].head == 0 < sizes[1].head


@pytest.mark.parametrize("override", ["data.path=none", "model.path=./none", "data.num_train=1000000"])
def test_what_is_local_and_wrong_is_refused_though_the_rest_is_on_the_hub(override, recipe):
    data = [f"data.path={recipe.parent / 'data'}"] if override.startswith("data.num") else []
    finished = run(python("--config", "opt-13b-sst2-lezo", "--dry-run", *data, override))
    assert finished.code == 2
    assert finished.err.count("error: ") == 1
    assert finished.out == ""


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", [deepspeed, mpirun])
def test_a_dry_run_on_two_ranks_prints_one_plan_for_two_ranks(launcher, recipe, tmp_path):
    finished = run_well(launcher(2, "--config", recipe, f"run_dir={tmp_path / 'run'}", "--dry-run"))
    assert finished.out.count("micro-batches of 2 examples") == 1
    assert "2, each with 2 of a step's 4 micro-batches of 2 examples" in finished.out
