"""A user's own table, conversations, answers and reward: trained and scored on two ranks."""

from __future__ import annotations

import json

import pytest
import yaml
from commands import run_forked_well
from own_data import (
    COLORS,
    VERBALIZERS,
    own_values,
    write_chat_model,
    write_conversations,
    write_tickets,
)
from run_ends import results_of

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
    "reward": (ASKED, {"objective": "my_reward:characters"}, "reward"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
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


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_and_scores(kind, root):
    arguments = ["--config", root / f"{kind}.yaml", f"run_dir={root / kind}", "train.steps=4"]
    run_forked_well(arguments, num_ranks=2)  # my_reward.py is beside the recipe
    results = results_of(root / kind)
    assert (results["steps"], results["metric"], results["task"]) == (4, KINDS[kind][2], "custom")
    rows = [json.loads(line) for file in (root / kind / "predictions").iterdir() for line in file.open()]
    if kind == "table":
        assert {row["predicted"] for row in rows} <= {*VERBALIZERS.values()}
    if kind == "chat":  # "Yes." and a color, each with the token that ends the turn; a byte is a token
        assert {row["predicted"].split(" of ")[1] for row in rows} <= {f"{6 + len(c)} tokens" for c in COLORS}
