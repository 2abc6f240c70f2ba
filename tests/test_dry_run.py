"""--dry-run: the plan of a run, from all that can be known before weights load."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from assets import NUM_BLOCKS, write_data, write_recipe
from commands import deepspeed, mpirun, python, run, run_well

from lezo_ds.config import load_config
from lezo_ds.tools.planning.dry_run import describe_plan


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe whose model has no weights: a dry run needs none."""
    directory = tmp_path_factory.mktemp("assets")
    path = write_recipe(directory)
    (directory / "model" / "model.safetensors").unlink()
    return path


def facts(finished):
    """Return the plan's lines by their headings, and what could not be checked, below the last."""
    lines = [(line[:16].strip(), line[16:]) for line in finished.out.splitlines() if line[15:16] == " "]
    names = [name for name, _ in lines]
    assert names.count("not checked") <= 1
    unchecked = lines[names.index("not checked") :] if "not checked" in names else []
    assert [name for name, _ in unchecked[1:]] == [""] * len(unchecked[1:])
    return dict(lines), [text for _, text in unchecked]


def test_a_local_recipe_is_checked_whole_and_its_plan_printed(recipe, tmp_path):
    plan, unchecked = facts(run_well(python("--config", recipe, f"run_dir={tmp_path / 'run'}", "--dry-run")))
    assert not unchecked
    assert plan["run directory"] == str(tmp_path / "run")
    assert plan["ranks"] == "1, each with 4 of a step's 4 micro-batches of 2 examples"
    assert plan["steps"] == "8, evaluated every 4"
    assert plan["optimiser"].startswith("learning rate 0.001, perturbation scale 0.001, dual forward")
    assert "OPTForCausalLM" in plan["model"]
    assert plan["blocks"] == f"{NUM_BLOCKS} in model.decoder.layers, {NUM_BLOCKS // 2} dropped a step"
    assert "GiB of shards" in plan["memory a rank"]
    assert plan["data"] == "sst2, protocol clean: 30 train, 11 dev, 13 test"
    assert re.fullmatch(r"[\d.]+ an example, with padding; [\d.]+ in rows of their own", plan["tokens"])
    assert not list(tmp_path.iterdir())


def test_what_lies_on_the_hub_is_listed_as_not_checked_offline():
    plan, unchecked = facts(run_well(python("--config", "opt-13b-sst2-lezo", "--dry-run")))
    assert plan["steps"] == "20000, evaluated every 2000"
    assert len(unchecked) == 2
    assert "facebook/opt-" in unchecked[0]
    assert "nyu-mll/glue" in unchecked[1]


def test_the_memory_of_a_published_size_is_known_without_the_hub():
    plan, _ = facts(run_well(python("--config", "opt-30b-sst2-lezo", "--dry-run")))
    assert plan["memory a rank"].startswith("55.83 GiB of shards; perturbed copies 0.77")


@pytest.mark.parametrize(
    ("overrides", "method", "bytes_a_parameter"),
    [
        (["method=zero_shot"], "zero_shot, tuned: nothing", 2),
        (["method=icl", "data.num_demonstrations=2", "data.max_length=64"], "icl, tuned: nothing", 2),
        (["method=mezo", "zo.sparsity=0"], "mezo, tuned: all weights", 4),
        (["peft.kind=lora"], "lezo, tuned: lora", 2),
        (["method=adamw"], "adamw, tuned: all weights", 16),
    ],
)
def test_the_plan_of_each_method_has_its_memory(overrides, method, bytes_a_parameter, recipe):
    values = load_config(recipe, ["run_dir=none", "model.dtype=bf16", *overrides])
    plan = {line[:16].strip(): line[16:] for line in describe_plan(values, 1).splitlines()}
    assert plan["method"] == method
    assert ("optimiser" in plan) == ("nothing" not in method)
    total = int(re.search(r"([\d,]+) parameters", plan["model"]).group(1).replace(",", ""))
    assert plan["memory a rank"].startswith(f"{total * bytes_a_parameter / 2**30:.2f} GiB")


def test_a_run_of_epochs_is_evaluated_every_tenth_of_it(recipe):
    overrides = ["run_dir=none", "method=adamw", "train.steps=null", "train.eval_every=null"]
    assert "5 epochs, evaluated every tenth of the run" in describe_plan(load_config(recipe, overrides), 1)


@pytest.mark.parametrize(
    ("recipe_name", "num_layers", "num_dropped", "gib"),
    [("opt-1.3b-sst2-lezo", 24, 18, "4.90"), ("opt-30b-sst2-lezo", 48, 36, "55.83")],
)
def test_the_plan_of_a_large_model_needs_only_its_config(
    recipe_name, num_layers, num_dropped, gib, tmp_path, recipe
):
    model = shutil.copytree(recipe.parent / "model", tmp_path / "model")
    shapes = {24: (2048, 8192, 32), 48: (7168, 28672, 56)}[num_layers]
    config = {"model_type": "opt", "vocab_size": 50272, "num_hidden_layers": num_layers}
    config |= dict(zip(("hidden_size", "ffn_dim", "num_attention_heads"), shapes, strict=True))
    config["word_embed_proj_dim"] = shapes[0]
    (model / "config.json").write_text(json.dumps(config))
    data = write_data(tmp_path / "data", num_train=1600)
    plan, unchecked = facts(
        run_well(python("--config", recipe_name, "--dry-run", f"model.path={model}", f"data.path={data}"))
    )
    assert not unchecked
    assert plan["blocks"] == f"{num_layers} in model.decoder.layers, {num_dropped} dropped a step"
    assert plan["memory a rank"].startswith(f"{gib} GiB of shards")
    assert plan["data"] == "sst2, protocol mezo: 1000 train, 500 dev, 30 test"


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
