"""The whole path from a record to a score, on the real SST-2 and a small model trained on English."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lezo_ds.data.batching import candidate_batch
from lezo_ds.data.encoding import encode_examples, load_tokenizer
from lezo_ds.data.metrics import accuracy, majority_class_rate
from lezo_ds.data.objectives import candidate_scores, predictions
from lezo_ds.data.records import load_records, sample_splits
from lezo_ds.tasks import TASKS

BATCH_SIZE = 32


def find_assets(name):
    """Return a file or folder of the test assets, which are too large to be part of the repository."""
    beside = Path(__file__).resolve().parents[3] / "shared"
    path = Path(os.environ.get("LEZO_TEST_ASSETS", beside)) / name
    if not path.exists():
        pytest.skip(f"{path} does not exist; set LEZO_TEST_ASSETS to the folder that holds {name}")
    return path


@pytest.fixture(scope="module")
def splits():
    train, validation = load_records(TASKS.find("SST2"), find_assets("data/sst2"))
    return sample_splits(TASKS.find("SST2"), train, validation, "clean", seed=0)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(find_assets("models/opt-mini")))


def test_the_splits_of_sst2_have_their_published_sizes(splits):
    assert (len(splits.train), len(splits.dev), len(splits.test)) == (1000, 500, 872)
    assert sum(example.label for example in splits.test) == 444


def test_sst2_becomes_one_row_an_example_that_begins_with_bos(splits, tokenizer):
    encoded = encode_examples(tokenizer, splits.test, 512)
    # 270 267 is " It was", 284 " terrible", 282 " great"
    assert {example.sequences[0][-3:] for example in encoded} == {(270, 267, 284)}
    assert {example.sequences[1][-3:] for example in encoded} == {(270, 267, 282)}
    assert {example.sequences[0][0] for example in encoded} == {0}
    batch = candidate_batch(encoded, tokenizer.pad_id)
    assert batch.inputs["input_ids"].shape[0] == 872
    assert batch.selection.vocabulary.tolist() == [284, 282]


@torch.inference_mode()
def test_opt_mini_gets_661_of_872_right_without_training(splits, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(find_assets("models/opt-mini"), dtype=torch.float32).eval()
    encoded = encode_examples(tokenizer, splits.test, 512)
    predicted = []
    for start in range(0, len(encoded), BATCH_SIZE):
        batch = candidate_batch(encoded[start : start + BATCH_SIZE], tokenizer.pad_id)
        chosen = batch.selection
        logits = model(**batch.inputs).logits[chosen.rows, chosen.positions][:, chosen.vocabulary]
        predicted += predictions(candidate_scores(logits, batch))
    assert accuracy(predicted, splits.test) == 661 / 872
    assert majority_class_rate(splits.test) == 444 / 872
