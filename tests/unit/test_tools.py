"""lezo-ds init and the parts of the benchmark that need no launcher."""

from __future__ import annotations

import sys

import pytest
import torch
from assets import write_recipe
from own_data import write_chat_model, write_tickets
from ranks import run_ranks
from tiny_runs import TINY_OPT, make_batch
from transformers import AutoModelForCausalLM

from lezo_ds import distributed
from lezo_ds.cli import run_command
from lezo_ds.config import ZoConfig, load_config
from lezo_ds.data.objectives import classification_loss
from lezo_ds.errors import UserError
from lezo_ds.tools.benchmark import answer_speeds, measure, parse_variant, recipe_inputs
from lezo_ds.tools.init import describe_task, num_steps
from lezo_ds.tools.mezo_reference import MezoReference

REWARD = """
from lezo_ds import reward

@reward
def brevity(answers, records):
    return [1 / (1 + len(answer.split())) for answer in answers]
"""
TEXTS = [f"ticket number {number} says" for number in range(40)]
CLASSES = ["bug", "billing"] * 20


def records(**columns):
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def test_init_takes_the_only_columns_of_texts_and_labels():
    title, task = describe_task(records(id=list(range(40)), body=TEXTS, topic=CLASSES))
    assert title == "Classification of body by topic"
    assert task == {
        "prompt": "{body}\nTopic:",
        "label_field": "topic",
        "labels": ["billing", "bug"],
    }
    answers = [f"the answer is {number}" for number in range(60)]
    questions = records(question=[f"what is {number}" for number in range(60)], answer=answers)
    _, task = describe_task(questions, text="question", answer="answer", in_chat=True)
    assert task == {
        "prompt": "{question}\nAnswer:",
        "completion": "{answer}",
        "chat_template": True,
    }
    intents = [f"intent {number % 80}" for number in range(400)]
    _, task = describe_task(
        records(text=[f"say {number}" for number in range(400)], intent=intents)
    )
    assert task["label_field"] == "intent" and len(task["labels"]) == 80
    turns = [[{"from": "human", "value": "hi"}]] * 40
    assert describe_task(records(turns=turns, source=CLASSES))[1] == {"messages": "turns"}


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (
            {"a": TEXTS, "b": TEXTS, "c": CLASSES},
            {},
            "several columns hold texts: a, b; fix: give --text",
        ),
        (
            {"a": TEXTS, "b": CLASSES, "c": CLASSES},
            {},
            "few different values: b, c; fix: give --label",
        ),
        (
            {"a": TEXTS, "b": CLASSES},
            {"label": "c"},
            "--label c is not a column; fix: use one of a, b",
        ),
        (
            {"a": TEXTS, "b": TEXTS},
            {"label": "b"},
            "40 different labels in 40 records; fix: .* --answer b",
        ),
        ({"a": TEXTS[:3], "b": CLASSES[:3]}, {}, "3 records are too few .*; fix: add records"),
    ],
)
def test_init_asks_for_the_columns_that_are_not_clear(columns, options, message):
    with pytest.raises(UserError, match=message):
        describe_task(records(**columns), **options)


def test_init_writes_a_recipe_that_a_run_can_start_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "model")
    write_tickets(tmp_path / "tickets.csv")

    def recipe(*words):
        monkeypatch.setattr(sys, "argv", ["init", *words])
        run_command("init")

    for method, kept in (
        ("fzoo", ("fzoo", "fixed", True, 15)),
        ("mezo", ("spsa", "uniform", False, 1)),
    ):
        recipe("model", "tickets.csv", "--out", f"{method}.yaml", "--method", method)
        config = load_config(tmp_path / f"{method}.yaml")
        zo, train = config.zo, config.train
        assert (zo.estimator, zo.layer_policy, zo.only_blocks, zo.directions) == kept
        assert (config.data.label_field, config.data.chat_template) == ("topic", True)
        assert (config.run_dir, train.steps) == ("runs/tickets", 100 if method == "fzoo" else 1000)
        assert "180 train, 60 dev, 60 test" in capsys.readouterr().out
    again, swapped = "model tickets.csv --out mezo.yaml", "tickets.csv model"
    for words, message in ((again, "exists"), (swapped, "init model tic")):
        with pytest.raises(UserError, match=message):
            recipe(*words.split())
    rows = ['"the\ntopic","a\ntext"', *map(",".join, zip(CLASSES, TEXTS, strict=True))]
    (tmp_path / "my: table #2.csv").write_text("\n".join(rows))
    recipe("model", "my: table #2.csv", "--out", "odd.yaml")
    assert load_config(tmp_path / "odd.yaml").run_dir == "runs/my: table #2"
    (tmp_path / "judge_of_init.py").write_text(REWARD)
    recipe(
        "model",
        "tickets.csv",
        "--reward",
        "judge_of_init:brevity",
        "--text",
        "text",
        "--out",
        "own.yaml",
    )
    small = ["generation.max_new_tokens=3", "data.max_length=128", "zo.directions=4"]
    config = load_config(tmp_path / "own.yaml", small)
    assert (config.data.prompt, config.train.objective) == ("{text}", "judge_of_init:brevity")
    speeds = answer_speeds(config, rounds=1)
    assert "240 tokens, 5 probes" in speeds and all(name in speeds for name in ("generate", "ours"))
    assert [num_steps(records) for records in (30, 1667, 100_000)] == [100, 310, 1000]


def test_the_reference_is_mezos_algorithm():
    distributed.init_distributed()
    model = AutoModelForCausalLM.from_config(TINY_OPT).eval().requires_grad_(False)
    (batch,) = make_batch(0, num_micro_batches=1)
    before = {name: values.clone() for name, values in model.named_parameters()}
    zo = ZoConfig(learning_rate=1e-2, perturbation_scale=1e-3, sparsity=0.0)
    steps = MezoReference(zo, model)
    gradient = steps.step(batch, classification_loss)
    generator = torch.Generator().manual_seed(steps._step_seed)
    noise = {
        name: torch.empty_like(values).normal_(generator=generator)
        for name, values in before.items()
    }

    def loss(multiple):
        for name, values in model.named_parameters():
            values.copy_(before[name] + multiple * noise[name])
        rows = model(**batch.inputs).logits[batch.selection.rows, batch.selection.positions]
        return classification_loss(rows[:, batch.selection.vocabulary], batch).mean().item()

    after = {name: values.clone() for name, values in model.named_parameters()}
    assert gradient == pytest.approx((loss(1e-3) - loss(-1e-3)) / 2e-3, rel=0.02)
    for name, values in after.items():
        torch.testing.assert_close(
            values, before[name] - 1e-2 * gradient * noise[name], atol=1e-5, rtol=1e-4
        )


def test_variants():
    assert [parse_variant(text) for text in ("ours:0.75", "recipe")] == [
        ("ours", 0.75),
        ("recipe", 0.0),
    ]
    for wrong in ("our:0", "ours:2"):
        with pytest.raises(UserError, match="unknown variant"):
            parse_variant(wrong)


def measured_rows(recipe):
    distributed.init_distributed()
    inputs = recipe_inputs(load_config(recipe, ["run_dir=none", "train.micro_batch_size=4"]))
    variants = ["mezo_reference", "ours:0.5", "recipe", "tensor_parallel:0.5"]
    return measure(inputs, variants, rounds=1)


@pytest.mark.distributed
def test_every_variant_is_measured_on_the_batches_of_a_recipe(tmp_path):
    rows, _ = run_ranks(measured_rows, 2, write_recipe(tmp_path))
    assert (rows["seconds"] > 0).all()
    published, ours, recipe, split = rows.to_dict("records")
    assert published["ratio"] == 1.0 and published["gathered GB"] == 0
    assert published["tokens"] > ours["tokens"] == recipe["tokens"]
    assert split["gathered GB"] > 0  # the sums of activations
    assert ours["gathered GB"] > 0
