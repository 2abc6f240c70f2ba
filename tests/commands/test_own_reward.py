"""A reward of a user's own on prompts without right answers, from the dry run to the exported model."""

from __future__ import annotations

import csv
import importlib
import json

import pytest
import yaml
from assets import REPOSITORY, write_records
from commands import assert_one_error, run_forked, run_forked_well
from own_data import own_values, path_with, write_byte_model, write_tickets
from run_ends import results_of

REWARD = """
import torch
from lezo_ds.data.objectives import reward

@reward
def characters(answers, records):
    assert {"id", "text", "topic"} <= records[0].keys()
    return [sum(map(ord, a)) / 1000 - len(r["topic"]) for a, r in zip(answers, records)]

def loss(answers, batch):
    return torch.zeros(len(answers))

@reward
def fails(answers, records):
    return [record["absent"] for record in records]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a model, 300 tickets, a module with rewards and a recipe that has no right answers."""
    directory = tmp_path_factory.mktemp("reward")
    values = own_values(
        write_byte_model(directory / "model"),
        train=str(write_tickets(directory / "tickets.csv")),
        prompt="{text}\nTicket",
        num_train=40,
        num_dev=6,
        num_test=8,
    )
    values["train"] |= {"objective": "my_reward:characters", "batch_size": 4, "micro_batch_size": 2}
    values["generation"] = {"max_new_tokens": 6, "temperature": 1.0, "num_samples": 2, "stop": []}
    (directory / "recipe.yaml").write_text(yaml.safe_dump(values))
    (directory / "my_reward.py").write_text(REWARD)
    return directory


def train(root, *more, run="run", well=True):
    runner = run_forked_well if well else run_forked
    arguments = ["--config", root / "recipe.yaml", f"run_dir={root / run}", *more]
    return runner(arguments, PYTHONPATH=path_with(root))


@pytest.fixture(scope="module")
def finished(root):
    """The directory of a run that stopped after 5 steps and was resumed."""
    train(root, "train.steps=5")
    train(root)
    return root / "run"


def test_a_dry_run_reads_the_reward_and_counts_prompts(root):
    plan = train(root, "--dry-run").out
    assert "custom, protocol clean: 40 train, 6 dev, 8 test" in plan


def test_it_trains_resumes_and_scores_the_mean_reward(root, finished):
    results = results_of(finished)
    assert (results["finished"], results["steps"], results["metric"]) == (True, 8, "reward")
    assert results["majority_class"] is None
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").open()]
    assert len({row["loss"] for row in rows if "projected_gradient" in row}) > 4
    tests = [row for row in rows if "test_reward" in row]
    assert tests
    assert all(row["test_reward"] == -row["test_loss"] for row in tests)
    at_once = train(root, "generation.keep_perturbed=true", run="at-once")
    assert at_once.code == 0
    assert results_of(root / "at-once")["weights_digest"] == results["weights_digest"]


def test_a_record_that_the_reward_reads_may_not_change(root, finished, tmp_path):
    with (root / "tickets.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["id"] = f"{row['id']}0"
    with (tmp_path / "tickets.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    failed = train(root, f"data.train={tmp_path / 'tickets.csv'}", well=False)
    assert_one_error(failed, 2, "the fingerprint of the", "differs from the journal's")


def test_the_exported_model_scores_as_its_run_did(root, finished):
    path = path_with(root)
    unasked = run_forked(["--run", finished], program="evaluate.py", PYTHONPATH=path)
    assert_one_error(unasked, 2, "the run's reward is in a module", "train.objective=my_reward:characters")
    asked = ["--run", finished, "train.objective=my_reward:characters", "--json"]
    of_run = json.loads(run_forked_well(asked, program="evaluate.py", PYTHONPATH=path).out)
    run_forked_well(["--run", finished, "--out", root / "exported"], program="export.py")
    arguments = ["--model", root / "exported", "--config", root / "recipe.yaml", "--json"]
    of_model = json.loads(run_forked_well(arguments, program="evaluate.py", PYTHONPATH=path).out)
    assert (of_model["score"], of_model["loss"]) == (of_run["score"], of_run["loss"])
    assert of_run["score"] == results_of(finished)["test"]


def test_packs_and_reports_need_no_reward(root, finished):
    pack = root / "run.tar.gz"
    run_forked_well(["--run", finished, "--out", pack], program="pack.py")
    model = f"model.path={root / 'model'}"
    run_forked_well(["--pack", pack, "--out", root / "unpacked", model], program="export.py")
    assert (root / "unpacked" / "model-00001.safetensors").is_file()
    assert "reward" in run_forked_well([finished], program="report.py").out


def test_the_recipe_of_keywords_trains_on_any_reviews(root, tmp_path):
    records = [{"sentence": f"A warm, funny and well-made film number {n}.", "stars": n} for n in range(24)]
    for name in ("train", "validation"):
        write_records(tmp_path / f"{name}.jsonl", records)
    recipes = REPOSITORY / "launch" / "recipes"
    sizes = ["data.num_train=8", "data.num_dev=2", "data.num_test=3", "train.steps=1"]
    places = {
        "model.path": root / "model",
        "data.train": tmp_path / "train.jsonl",
        "data.test": tmp_path / "validation.jsonl",
        "run_dir": tmp_path / "run",
    }
    paths = [f"{key}={path}" for key, path in places.items()]
    batch = ["train.batch_size=2", "train.micro_batch_size=2", "zo.sparsity=0.5"]  # of its 2 blocks
    arguments = ["--config", recipes / "keywords.yaml", *sizes, *paths, *batch]
    run_forked_well(arguments, PYTHONPATH=path_with(recipes))
    assert results_of(tmp_path / "run")["metric"] == "keywords:share_in_form"


@pytest.mark.parametrize(
    ("answer", "mistakes"),
    [
        ("warm, funny, well-made", 0),
        ("Film,  A, funny", 0),
        ("warm, funny", 1),
        ("warm, warm, film", 1),
        ("warm, cold, film", 1),
        ("a warm, funny, film", 1),
        ("", 3),
    ],
)
def test_the_reward_of_keywords_counts_mistakes(answer, mistakes, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "launch" / "recipes")
    keywords = importlib.import_module("keywords")
    record = {"sentence": "A warm, funny and well-made film."}
    assert keywords.num_mistakes(answer, record) == mistakes
    assert keywords.three_words([answer], [record]) == [1 / (1 + mistakes)]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (["train.objective=task"], ("data.prompt alone does not say", "or a reward")),
        (["train.objective=my_reward:loss"], ("a task without right answers needs a reward",)),
        (
            ["train.objective=my_reward:fails"],
            ("train.objective=my_reward:fails failed", "KeyError", "line 15"),
        ),
        (
            ["data.metric=reward", "train.objective=my_reward:loss", "data.completion='{text}'"],
            ("needs a reward",),
        ),
        (["method=icl"], ("method icl shows solved examples",)),
        (["data.label_field=topic"], ("data.prompt alone does not say",)),
        (["generation.temperature=0"], ("generation.num_samples", "needs a temperature")),
        (["generation.stop=''"], ("generation.stop", "has an empty text")),
        (["generation.top_p=0"], ("generation.top_p", "above 0")),
    ],
)
def test_what_does_not_fit_a_reward_is_refused(root, changes, parts):
    assert_one_error(train(root, *changes, run="refused", well=False), 2, *parts)
