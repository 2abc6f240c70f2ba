"""The benchmark on the model and the sentences of a recipe."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from assets import REPOSITORY, shared_asset, write_recipe
from commands import assert_refused, run_well
from ranks import run_ranks

from lezo_ds import distributed
from lezo_ds.errors import UserError
from lezo_ds.recipes import load_recipe
from lezo_ds.runs.trainer import train
from lezo_ds.tools.benchmark import table
from lezo_ds.tools.benchmark.measure import WARM_UP_STEPS, measure_steps
from lezo_ds.tools.benchmark.recipe_inputs import RecipeInputs
from lezo_ds.tools.benchmark.reference import plain_steps
from lezo_ds.tools.benchmark.settings import Variant
from lezo_ds.tools.benchmark.until_loss import measure_until_loss

pytestmark = pytest.mark.distributed

BENCHMARK = [sys.executable, str(REPOSITORY / "launch" / "benchmark.py")]
VARIANTS = ("mezo_reference", "naive_zero3:0.5", "ours:0", "ours:0.5")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    directory = tmp_path_factory.mktemp("benchmark")
    path = write_recipe(directory)
    path.write_text(f"{path.read_text()}run_dir: {directory / 'run'}\n")
    return str(path)


def parsed(names):
    return [Variant.parse(name) for name in names]


def contexts(batches):
    """Return the tokens in front of each selected logit, padding and other examples of the row left out."""
    found = []
    for batch in batches:
        tokens, places = batch.inputs["input_ids"], batch.inputs.get("position_ids")
        for row, end in zip(batch.selection.rows, batch.selection.positions, strict=True):
            start = 0 if places is None else end - places[row, end]
            found.append(tuple(tokens[row, start : end + 1].tolist()))
    return sorted(found)


def _compare_layouts(config, num_steps):
    """Return of each step the contexts, the tokens and the loss of our layout, and of the published one."""
    distributed.init_distributed()
    inputs = RecipeInputs(config)
    plain = plain_steps(Variant.parse("mezo_reference"), inputs.plain_model(), inputs)
    models = {"ours": inputs.start_engine(), "published": plain}
    found = []
    for step in range(num_steps):
        layouts = {"ours": inputs.batches(step), "published": inputs.published_batches(step)}
        found.append({})
        for name, batches in layouts.items():
            with torch.no_grad():
                summed = sum(inputs.loss(models[name].forward(b), b).sum().item() for b in batches)
            tokens = sum(batch.inputs["input_ids"].numel() for batch in batches)
            loss = summed / sum(batch.weight for batch in batches)
            found[-1][name] = (contexts(batches), tokens, loss)
    return found


@pytest.mark.parametrize("packed", ["true", "false"])
def test_both_layouts_hold_the_same_examples_and_give_the_same_loss(recipe, packed):
    config = load_recipe(recipe, [f"train.packed={packed}", "train.micro_batch_size=4"])
    ((first, second),) = run_ranks(_compare_layouts, 1, config, 2)
    for step in (first, second):
        (ours, few, loss), (published, many, expected) = step["ours"], step["published"]
        assert published == sorted([*ours, *ours])  # one sequence for each of the two candidates
        assert len(ours) == config.train.batch_size and few < many
        assert loss == pytest.approx(expected, rel=1e-5)
    assert first["ours"][0] != second["ours"][0]


@pytest.mark.parametrize("task", ["SST2", "BoolQ", "Copa"])
def test_real_sentences_have_the_same_loss_in_both_layouts(recipe, task):
    overrides = [
        *("model.path=" + str(shared_asset("models/opt-mini")), "zo.learning_rate=1e-6"),
        *(f"data.task={task}", "data.path=" + str(shared_asset(f"data/{task.lower()}"))),
    ]
    ((step,),) = run_ranks(_compare_layouts, 1, load_recipe(recipe, overrides), 1)
    assert step["ours"][2] == pytest.approx(step["published"][2], rel=1e-4)
    assert step["ours"][1] < step["published"][1]


def _measure(config, rounds):
    inputs = partial(RecipeInputs, config)
    return measure_steps(inputs, parsed(VARIANTS), rounds=rounds, replay=True)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_variant_is_timed_on_a_recipe(recipe, num_ranks):
    config, rounds = load_recipe(recipe), 2
    found = table.to_frame(run_ranks(_measure, num_ranks, config, rounds)[0])
    steps = found[found.measured == "step"]
    assert list(steps.variant) == list(VARIANTS)
    assert (steps.model == config.model.path).all() and (steps["data"] == config.data.path).all()
    assert (steps.layers == 4).all() and (steps.batch == 8).all() and (steps.micro_batches == 4).all()
    assert steps["shape"].isna().all() and (steps.ratio > 0).all()
    assert list(found[found.measured == "replay"].variant) == ["ours:0", "ours:0.5"]
    timed = range(WARM_UP_STEPS, WARM_UP_STEPS + rounds)
    compared = run_ranks(_compare_layouts, 1, config, timed.stop)[0][timed.start :]
    ours = sum(step["ours"][1] for step in compared) / rounds
    assert list(steps.fed_tokens[steps.variant.str.startswith("ours")]) == [round(ours)] * 2
    assert (steps.fed_tokens[~steps.variant.str.startswith("ours")] > 1.5 * ours).all()


def _until(config, until_loss, names):
    return measure_until_loss(config, parsed(names), until_loss=until_loss)


def _trained(config):
    train(config)


def dev_losses(config, tmp_path):
    """Return the validation loss by step of a real run of the recipe."""
    from lezo_ds.journal import EvaluationRecord, Journal

    run_ranks(_trained, 1, config)
    with Journal.open(tmp_path / "run" / "journal.jsonl") as journal:
        records = [record for record in journal.records if isinstance(record, EvaluationRecord)]
    return {record.step: record.loss for record in records if record.split == "dev"}


def test_training_until_a_loss_is_the_training_of_the_run_and_ends_where_it_gets_there(recipe, tmp_path):
    overrides = [
        "train.steps=12",
        "train.eval_every=2",
        "zo.learning_rate=1e-2",
        f"run_dir={tmp_path / 'run'}",
    ]
    config = load_recipe(recipe, overrides)
    losses = dev_losses(config, tmp_path)
    at = min(losses, key=losses.get)
    first = next(step for step in losses if losses[step] <= losses[at])
    (rows,) = run_ranks(_until, 1, config, losses[at], ["ours:0.5", "mezo_reference", "naive_zero3"])
    ours, *others = rows
    assert (ours["steps"], ours["forward_passes"]) == (first, 2 * first)
    assert ours["loss"] == pytest.approx(losses[first], rel=1e-6)
    assert ours["ratio"] == 1 and ours["seconds"] > 0
    for row in others:
        got_there = row["loss"] <= losses[at]
        assert got_there or row["steps"] == 12
        assert row["steps"] % 2 == 0 and row["forward_passes"] == 2 * row["steps"]
        assert row["ratio"] == (pytest.approx(ours["seconds"] / row["seconds"]) if got_there else None)
    table.to_frame(rows)


def test_the_step_that_a_recipe_describes_is_compared_with_mezo_at_a_rate_of_its_own(recipe, tmp_path):
    zo = ["estimator=fzoo", "directions=4", "probes_per_pass=6", "only_blocks=true", "lr_schedule=linear"]
    zo += ["learning_rate=1e-2", "noise_distribution=rademacher", "layer_policy=fixed"]
    overrides = [*(f"zo.{setting}" for setting in zo), "train.steps=4", "train.eval_every=2"]
    config = load_recipe(recipe, [*overrides, f"run_dir={tmp_path / 'run'}"])
    losses = dev_losses(config, tmp_path)
    (rows,) = run_ranks(_until, 1, config, -1.0, ["mezo_reference@1e-6", "mezo_reference", "recipe"])
    assert [row["forward_passes"] for row in rows] == [8, 8, 20]
    assert rows[0]["loss"] != rows[1]["loss"]
    assert rows[2]["loss"] == pytest.approx(losses[4], rel=1e-6)
    assert table.to_frame(rows)["sparsity"].isna().tolist() == [False, False, True]


def test_a_loss_out_of_reach_ends_after_all_steps_without_a_ratio(recipe):
    config = load_recipe(recipe, ["train.steps=3", "train.eval_every=2"])
    names = ["ours:0.5", "naive_zero3", "mezo_reference"]
    results = run_ranks(_until, 2, config, -1.0, names)
    for row in results[0]:
        assert (row["steps"], row["ratio"]) == (3, None)
    assert [row["loss"] for row in results[0]] == [row["loss"] for row in results[1]]
    # Every variant starts from the recipe's weights: a second time gives the same.
    (again,) = run_ranks(
        _until, 1, config, -1.0, ["mezo_reference", "mezo_reference", "ours:0.5", "ours:0.5"]
    )
    losses = [row["loss"] for row in again]
    assert losses[0] == losses[1] and losses[2] == losses[3] != losses[0]
    assert losses[2] == pytest.approx(results[0][0]["loss"], rel=1e-6)


def test_a_loss_that_is_already_reached_takes_no_step(recipe):
    (rows,) = run_ranks(_until, 1, load_recipe(recipe), 100.0, ["mezo_reference", "ours"])
    assert [(row["steps"], row["seconds"], row["ratio"]) for row in rows] == [(0, 0.0, None)] * 2


@pytest.mark.parametrize(
    "override", ["method=adamw", "peft.kind=lora", "train.objective=lezo_ds.data.objectives:f1_loss"]
)
def test_a_recipe_that_cannot_be_compared_is_refused(recipe, override):
    config = load_recipe(recipe, [override, "train.steps=1"])
    with pytest.raises(UserError, match="cannot compare this recipe with MeZO's code"):
        RecipeInputs(config)


def test_a_command_measures_a_recipe_and_appends_to_an_old_table(recipe, tmp_path):
    out = tmp_path / "results.csv"
    old = table.to_frame([{"measured": "step", "variant": "ours:0", "length": 32}])
    new = ["model", "data", "until_loss", "loss", "steps", "forward_passes", "seconds", "fed_tokens"]
    old.drop(columns=new).to_csv(out, index=False)
    command = [*BENCHMARK, "--config", recipe, "--out", str(out)]
    run_well([*command, "--rounds", "1", "mezo_reference", "train.batch_size=4", "ours:0.5"])
    shown = run_well([*command, "--until-loss", "100", "mezo_reference", "ours:0.5"])
    assert "until loss" in shown.out
    assert "mezo_reference, step 0: validation loss" in shown.err
    found = table.read(out)
    assert list(found.measured) == ["step"] * 3 + ["until loss"] * 2
    assert list(found.batch.dropna()) == [4, 4, 8, 8]
    assert found["data"].isna().tolist() == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "opt-125m", "ours"], "--shape describes random inputs, but --config names a recipe"),
        (["--until-loss", "0.5", "--replay", "ours"], "--until-loss trains a recipe"),
        (["--until-loss", "0.5", "--noise", "10"], "nothing to measure"),
        (["train.stops=3", "ours"], "train.stops"),
        (
            ["zo.only_blocks=true", "recipe", "ours"],
            "this recipe does not; got: zo.only_blocks=true",
        ),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(recipe, arguments, message):
    assert_refused([*BENCHMARK, "--config", recipe, *arguments], message)


def test_what_changes_a_recipe_needs_one():
    assert_refused([*BENCHMARK, "ours", "train.steps=3"], "there is none")
    assert_refused([*BENCHMARK, "ours", "--until-loss", "0.5"], "--until-loss trains a recipe")
    assert_refused([*BENCHMARK, "recipe"], "a recipe's own step, but there is none")


def test_a_task_whose_validation_generates_answers_is_not_trained_until_a_loss(recipe, monkeypatch):
    inputs = RecipeInputs(load_recipe(recipe))
    inputs.data = replace(inputs.data, dev=replace(inputs.data.dev, prompts=((1, 2),)))
    monkeypatch.setattr("lezo_ds.tools.benchmark.until_loss.RecipeInputs", lambda config: inputs)
    with pytest.raises(UserError, match="--until-loss needs a task with candidates"):
        measure_until_loss(inputs.config, parsed(["ours"]), until_loss=0.5)
