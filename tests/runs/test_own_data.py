"""A user's own table, conversations, answers and reward: trained on two ranks, resumed on one, scored."""

from __future__ import annotations

import json

import pytest
import yaml
from chats import COLORS, write_chat_model, write_conversations
from commands import assert_one_error, run_forked, run_forked_well
from own_data import VERBALIZERS, own_values, path_with, write_tickets
from run_ends import end, results_of

pytestmark = pytest.mark.distributed

REWARD = """
from lezo_ds import reward

@reward
def characters(answers, records):
    assert {"id", "text", "topic"} <= records[0].keys()
    return [sum(map(ord, a)) / 1000 - len(r["topic"]) for a, r in zip(answers, records)]
"""
TICKETS = {"train": "tickets.csv", "num_train": 40, "num_dev": 6, "num_test": 8}
ASKED = TICKETS | {"prompt": "{text}\nThis ticket is about"}
# kind -> (section data, section train, metric)
KINDS = {
    "table": (ASKED | {"label_field": "topic", "labels": VERBALIZERS}, {}, "accuracy"),
    "chat": (
        {"train": "boxes.jsonl", "messages": "turns", "system_prompt": "Be brief."},
        {},
        "token_accuracy",
    ),
    "answers": (
        ASKED | {"completion": "{topic}", "chat_template": True, "metric": "exact_match"},
        {},
        "exact_match",
    ),
    "reward": (ASKED, {"objective": "my_reward:characters"}, "reward"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A directory with a model, data, a reward, and a recipe for each kind of data."""
    directory = tmp_path_factory.mktemp("own")
    model = write_chat_model(directory / "model")
    write_tickets(directory / "tickets.csv", num_rows=80)
    write_conversations(directory / "boxes.jsonl")
    (directory / "my_reward.py").write_text(REWARD)
    for kind, (data, train, _) in KINDS.items():
        values = own_values(model, **data)
        values["train"] |= train
        values["generation"] = {"max_new_tokens": 6, "stop": [";"]}
        if kind == "reward":
            values["generation"] |= {"temperature": 1.0, "num_samples": 2}
        (directory / f"{kind}.yaml").write_text(yaml.safe_dump(values))
    return directory


def train(root, kind, *more, run, runner=run_forked_well, **options):
    arguments = ["--config", root / f"{kind}.yaml", f"run_dir={root / kind / run}", *more]
    return runner(arguments, PYTHONPATH=path_with(root), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_resumes_and_scores_with_the_same_bits_on_any_number_of_ranks(kind, root):
    train(root, kind, run="whole")
    train(root, kind, "train.steps=5", run="parts", num_ranks=2)
    train(root, kind, run="parts")
    whole, parts = (end(root / kind / run) for run in ("whole", "parts"))
    assert (whole.digest, whole.results) == (parts.digest, parts.results)
    results = results_of(root / kind / "whole")
    assert (results["steps"], results["metric"], results["task"]) == (8, KINDS[kind][2], "custom")
    rows = [json.loads(line) for file in (root / kind).glob("whole/predictions/*") for line in file.open()]
    if kind == "table":
        assert {row["predicted"] for row in rows} <= {*VERBALIZERS.values()}
    if kind == "chat":  # "Yes." and a color, each with the token that ends the turn; a byte is a token
        assert {row["predicted"].split(" of ")[1] for row in rows} <= {f"{6 + len(c)} tokens" for c in COLORS}


def test_a_record_that_the_reward_reads_may_not_change(root, tmp_path):
    train(root, "reward", "train.steps=1", run="first")
    text = (root / "tickets.csv").read_text()
    (tmp_path / "tickets.csv").write_text(text.replace("\n1,", "\n1000,"))
    changed = f"data.train={tmp_path / 'tickets.csv'}"
    failed = train(root, "reward", "train.steps=1", changed, run="first", runner=run_forked)
    assert_one_error(failed, 2, "fingerprint", "differs from the journal's")
