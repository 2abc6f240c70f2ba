"""A user's own conversations: trained and scored on two ranks. Pages and predictions train own
tables."""

from __future__ import annotations

import json

import pytest
import yaml
from commands import run_forked_well
from own_data import COLORS, own_values, write_chat_model, write_conversations
from run_ends import results_of


@pytest.mark.distributed
def test_conversations_train_and_score(tmp_path):
    write_conversations(tmp_path / "boxes.jsonl")
    data = {"train": "boxes.jsonl", "messages": "turns", "system_prompt": "Be brief."}
    values = own_values(write_chat_model(tmp_path / "model"), **data)
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(values))
    run_dir = tmp_path / "run"
    run_forked_well(
        ["--config", tmp_path / "chat.yaml", f"run_dir={run_dir}", "train.steps=4"], num_ranks=2
    )
    results = results_of(run_dir)
    assert (results["steps"], results["metric"], results["task"]) == (4, "token_accuracy", "custom")
    rows = [
        json.loads(line) for file in (run_dir / "predictions").iterdir() for line in file.open()
    ]
    # An answer is a row, with the token that ends its turn and the newline after it. A byte is a
    # token.
    answers = ["Yes.", *COLORS]
    assert {row["predicted"].split(" of ")[1] for row in rows} <= {
        f"{len(answer) + 2} tokens" for answer in answers
    }
