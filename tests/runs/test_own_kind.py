"""A fifth kind of task needs one file of the user's, and no line of the package."""

from __future__ import annotations

import json
from statistics import fmean

import pytest
import torch
import yaml
from commands import run_forked_well
from lezo_ds.data.tables import read_file
from own_data import own_values, write_byte_model
from own_kind import STARS
from run_ends import records_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from lezo_ds.journal import EvaluationRecord

pytestmark = pytest.mark.distributed


def write_reviews(path, num_records=24):
    rows = []
    for number in range(num_records):
        text = f"Film {number} is {'so ' * (number % 3)}fine."
        rows.append({"text": text, "stars": 1 + number % 5})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@torch.no_grad()
def expected_by_hand(model, tokenizer, text):
    """Return the mean of the stars by one plain pass for each candidate."""
    prompt = [0, *tokenizer(f"{text} Stars:", add_special_tokens=False)["input_ids"]]  # after <s>
    scores = []
    for star in STARS:
        ids = [0, *tokenizer(f"{text} Stars: {star}", add_special_tokens=False)["input_ids"]]
        logs = model(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
        own = [logs[place - 1, ids[place]].item() for place in range(len(prompt), len(ids))]
        scores.append(fmean(own))
    shares = torch.tensor(scores).softmax(dim=0)
    return float(shares @ torch.tensor(STARS, dtype=shares.dtype))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_kind_of_ones_own_is_trained_scored_and_predicted(num_ranks, tmp_path):
    model = write_byte_model(tmp_path / "model")
    rows = write_reviews(tmp_path / "reviews.jsonl")
    values = own_values(model, task="own_kind:RATING", train=str(tmp_path / "reviews.jsonl"))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    keys = ["train.steps=2", "train.eval_every=2", "data.num_test=8"]
    command = ["--config", tmp_path / "recipe.yaml", f"run_dir={tmp_path / 'run'}", *keys]
    run_forked_well(command, num_ranks=num_ranks)

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = {row["text"]: expected_by_hand(plain, tokenizer, row["text"]) for row in rows}
    stars = {row["text"]: row["stars"] for row in rows}
    tested = [record for _, record in read_file(tmp_path / "run/predictions/step-00000000.jsonl")]
    texts = [record["prompt"].removesuffix(" Stars:") for record in tested]
    for record, text in zip(tested, texts, strict=True):
        assert float(record["predicted"]) == pytest.approx(expected[text], rel=1e-4)
    (before, *_) = records_of(tmp_path / "run", EvaluationRecord)
    errors = [expected[text] - stars[text] for text in texts]
    assert before.loss == pytest.approx(fmean(error**2 for error in errors), rel=1e-4)
    mean_error = fmean(map(abs, errors))
    assert before.metrics["own_kind:closeness"] == pytest.approx(1 - mean_error / 4, rel=1e-4)

    (tmp_path / "new.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in expected))
    asked = ["--run", tmp_path / "run", "--step=0", tmp_path / "new.jsonl"]
    named = ["data.task=own_kind:RATING", "data.metric=own_kind:closeness"]
    run_forked_well([*asked, "--out", tmp_path / "out.jsonl", *named], program="predict")
    for _, record in read_file(tmp_path / "out.jsonl"):
        assert record["predicted"] == pytest.approx(expected[record["text"]], abs=0.006)
