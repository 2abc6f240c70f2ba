"""Conversations, from the dry run to the exported model, with a recipe and no Python."""

from __future__ import annotations

import json

import pytest
import yaml
from chats import COLORS, PLAIN, write_chat_model, write_conversations
from commands import assert_one_error, run_forked, run_forked_well
from own_data import own_values
from run_ends import end, records_of, results_of
from transformers import AutoTokenizer

from lezo_ds.journal import EvaluationRecord


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a model, 40 conversations and a recipe that trains on them."""
    directory = tmp_path_factory.mktemp("chat")
    data = {
        "train": str(write_conversations(directory / "boxes.jsonl")),
        "messages": "turns",
        "system_prompt": "Be brief.",
        "num_dev": 10,
        "num_test": 12,
    }
    values = own_values(write_chat_model(directory / "model"), **data)
    (directory / "recipe.yaml").write_text(yaml.safe_dump(values))
    return directory


def train(root, *more, run="run", **options):
    arguments = ["--config", root / "recipe.yaml", f"run_dir={root / run}", *more]
    return run_forked_well(arguments, **options)


def evaluate(root, *arguments):
    """Return the score of a run or a model, with its predictions."""
    path = root / "scored.json"
    run_forked_well([*arguments, "--predictions", path], program="evaluate.py")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def finished(root):
    """A run that stopped after 5 steps and was resumed."""
    train(root, "train.steps=5")
    train(root)
    return root / "run"


def test_a_dry_run_reads_the_conversations(root):
    plan = train(root, "--dry-run", run="none")
    assert "custom, protocol clean: 18 train, 10 dev, 12 test" in plan.out
    assert not (root / "none").exists()


def test_it_trains_resumes_and_scores_its_tokens(finished):
    results = results_of(finished)
    assert (results["finished"], results["steps"], results["metric"]) == (True, 8, "token_accuracy")
    evaluations = [record for record in records_of(finished, EvaluationRecord) if record.split == "dev"]
    assert {record.step for record in evaluations} == {4, 5, 8}
    assert all(record.metrics.keys() == {"token_accuracy"} for record in evaluations)
    assert len({record.loss for record in evaluations}) == 3
    rows = [json.loads(line) for file in finished.glob("predictions/*") for line in file.open()]
    # "Yes." and a color, each with the token that ends the turn; a byte is a token.
    assert {row["predicted"].split(" of ")[1] for row in rows} <= {f"{6 + len(c)} tokens" for c in COLORS}
    assert {row["prompt"] for row in rows} == {"Its color?"}
    assert {row["right"][0] for row in rows} <= {*COLORS}


@pytest.mark.distributed
def test_two_ranks_have_the_same_bits(root, finished):
    train(root, run="two", num_ranks=2)
    one, two = end(finished), end(root / "two")
    assert (one.digest, one.results) == (two.digest, two.results)


def test_the_exported_model_scores_as_its_run_did_and_keeps_its_template(root, finished):
    of_run = evaluate(root, "--run", finished)
    run_forked_well(["--run", finished, "--out", root / "exported"], program="export.py")
    of_model = evaluate(root, "--model", root / "exported", "--config", root / "recipe.yaml")
    kept = ("score", "loss", "majority_class", "num_examples", "metric", "task", "predictions")
    assert {name: of_model[name] for name in kept} == {name: of_run[name] for name in kept}
    assert of_run["score"] == results_of(finished)["test"]
    assert of_run["majority_class"] is None
    right, total = of_run["predictions"][0]["prediction"]
    assert of_run["predictions"][0]["text"] == f"{right} of {total} tokens"
    assert AutoTokenizer.from_pretrained(root / "exported").chat_template == PLAIN


def test_a_pack_exports_without_the_data(root, finished):
    pack = root / "run.tar.gz"
    run_forked_well(["--run", finished, "--out", pack], program="pack.py")
    model = f"model.path={root / 'model'}"
    run_forked_well(["--pack", pack, "--out", root / "unpacked", model], program="export.py")
    assert (root / "unpacked" / "model-00001.safetensors").is_file()


def test_a_report_and_a_plan_know_the_task(root, finished):
    assert "token_accuracy of boxes" in run_forked_well([finished], program="report.py").out
    arguments = ["--config", root / "recipe.yaml", "--gpus", "1", "--gpu-memory", "8", "run_dir=x"]
    assert "custom" in run_forked_well(arguments, program="plan.py").out


def test_a_question_is_answered_after_the_template_and_trained_with_it(root, tmp_path):
    rows = [{"q": f"Box {number}?", "a": COLORS[number % len(COLORS)]} for number in range(20)]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    asked = {"prompt": "{q}", "completion": "{a}", "chat_template": True, "metric": "exact_match"}
    values = own_values(root / "model", train=str(tmp_path / "data.json"), **asked)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    train(tmp_path, "train.steps=2", "train.eval_every=1")
    results = results_of(tmp_path / "run")
    assert (results["finished"], results["metric"]) == (True, "exact_match")


def test_a_model_without_a_template_ends_a_dry_run_with_one_line(root, tmp_path):
    model = write_chat_model(tmp_path / "model", template=None)
    arguments = ["--config", root / "recipe.yaml", "run_dir=none", f"model.path={model}", "--dry-run"]
    assert_one_error(run_forked(arguments), 2, "has no chat template", str(model))


def test_a_token_that_the_model_lacks_ends_a_dry_run_with_one_line(root, tmp_path):
    model = write_chat_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["Its color"])
    tokenizer.save_pretrained(model)
    arguments = ["--config", root / "recipe.yaml", "run_dir=none", f"model.path={model}", "--dry-run"]
    assert_one_error(run_forked(arguments), 2, "the model's embedding has no row for", "'Its color'")
