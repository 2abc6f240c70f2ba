"""The protocol on published records, with the tokens of a small OPT trained on English, and its score."""

from __future__ import annotations

import pytest
import torch
from assets import shared_asset
from transformers import AutoModelForCausalLM

from lezo_ds.config import DataConfig
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.encoding import encode_example, encode_examples, load_tokenizer
from lezo_ds.data.objectives import candidate_scores
from lezo_ds.data.splits import load_splits
from lezo_ds.data.tables import read_file
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.metrics import accuracy, majority_class_score

MAX_LENGTH = 512
BATCH_SIZE = 32
# task -> (row of validation, prompt, candidates, tokens of the prompt without BOS, tokens of each candidate);
# the prompts and candidates were worked out by hand, the tokens by the tokenizers library from the text.
PUBLISHED = {
    "sst2": (830, "bad . It was", (" terrible", " great"), (3618, 338, 270, 267), ((284,), (282,))),
    "copa": (
        58,
        "The man fainted because ",
        ("he took a nap.", "he ran a marathon."),
        (1146, 540, 288, 405, 1066, 1088),
        ((407, 1971, 264, 316, 431, 17), (407, 5125, 264, 1216, 597, 285, 17)),
    ),
}
MAJORITY = {"sst2": 444 / 872, "rte": 146 / 277, "cb": 28 / 56, "boolq": 2033 / 3270, "copa": 55 / 100}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(shared_asset("models/opt-mini")))


def load(name):
    path = shared_asset(f"data/{name}") / "validation.jsonl"
    return TASKS[name], [record for _, record in read_file(path)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_record_becomes_the_text_and_tokens_of_the_protocol(name, tokenizer):
    task, validation = load(name)
    row, prompt, candidates, prompt_ids, candidate_ids = PUBLISHED[name]
    example = task.build_example(validation[row], row)
    assert (example.prompt, example.candidates) == (prompt, candidates)
    encoded = encode_example(tokenizer, example, MAX_LENGTH)
    assert encoded.sequences == tuple((0, *prompt_ids, *ids) for ids in candidate_ids)
    assert encoded.option_lengths == tuple(len(ids) for ids in candidate_ids)


@pytest.mark.parametrize("name", MAJORITY)
def test_the_majority_class_is_that_of_the_published_labels(name):
    task, validation = load(name)
    examples = [task.build_example(record, row) for row, record in enumerate(validation)]
    assert majority_class_score(examples, accuracy) == MAJORITY[name]


@torch.inference_mode()
def test_opt_mini_gets_661_of_872_right_without_training(tokenizer):
    test = load_splits(TASKS["sst2"], DataConfig(path=str(shared_asset("data/sst2")))).test
    model = AutoModelForCausalLM.from_pretrained(shared_asset("models/opt-mini"), dtype=torch.float32).eval()
    encoded = encode_examples(tokenizer, test, MAX_LENGTH)
    predicted = []
    for start in range(0, len(encoded), BATCH_SIZE):
        batch = candidate_batch(encoded[start : start + BATCH_SIZE], tokenizer.pad_id)
        chosen = batch.selection
        logits = model(**batch.inputs).logits[chosen.rows, chosen.positions][:, chosen.vocabulary]
        predicted += candidate_scores(logits, batch).argmax(dim=1).tolist()
    assert accuracy(predicted, test) == 661 / 872
