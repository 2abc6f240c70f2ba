"""The protocol on published records, with the tokens of a small OPT trained on English, and its score."""

from __future__ import annotations

import pytest
import torch
from assets import shared_asset
from transformers import AutoModelForCausalLM

from lezo_ds.config import DataConfig
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.encoding import encode_example, encode_examples, load_tokenizer
from lezo_ds.data.objectives import candidate_scores, predictions
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
    "rte": (
        208,
        "The girl was found in Drummondville.\n"
        'Does this mean that "Drummondville contains the girl." is true? Yes or No?\n',
        ("Yes", "No"),
        (
            *(1146, 2033, 267, 1199, 303, 3587, 373, 8182, 2472, 17, 202),
            *(39, 1318, 497, 1944, 349, 746, 39, 3671, 8182, 2472, 3965, 274, 2033, 1540, 325, 2166, 34),
            *(881, 291, 402, 3419, 34, 202),
        ),
        ((6928,), (4997,)),
    ),
    "cb": (
        14,
        "Suppose A: Your turn. B: Okay. Uh, I don't think they should abolish it. "
        'Can we infer that "they should abolish it"? Yes, No, or Maybe?\n',
        ("Yes", "No", "Maybe"),
        (
            *(54, 88, 587, 716, 346, 29, 7888, 1272, 17, 399, 29, 6685, 347, 17, 481, 75, 15, 266, 3314, 594),
            *(1597, 622, 1215, 476, 344, 584, 337, 17, 1524, 634, 303, 692, 349, 746, 5296, 1215, 476, 344),
            *(584, 337, 4841, 881, 291, 15, 3419, 15, 402, 2030, 737, 34, 202),
        ),
        ((6928,), (4997,), (8177,)),
    ),
    "boolq": (
        2644,
        "The Punisher (season 2) -- The season is set for release in 2019. "
        "Are they going to make a punisher season 2?\n",
        ("Yes", "No"),
        (
            *(1146, 420, 381, 584, 263, 389, 4179, 423, 12, 388, 369, 889, 325, 934, 348, 3003, 303, 7465),
            *(17, 3963, 622, 1573, 308, 938, 264, 3903, 584, 263, 889, 423, 34, 202),
        ),
        ((6928,), (4997,)),
    ),
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


@pytest.fixture(scope="module", params=PUBLISHED)
def data(request):
    path = shared_asset(f"data/{request.param}") / "validation.jsonl"
    return TASKS[request.param], [record for _, record in read_file(path)]


def test_a_published_record_becomes_the_text_and_tokens_of_the_protocol(data, tokenizer):
    task, validation = data
    row, prompt, candidates, prompt_ids, candidate_ids = PUBLISHED[task.name]
    example = task.build_example(validation[row], row)
    assert (example.prompt, example.candidates) == (prompt, candidates)
    encoded = encode_example(tokenizer, example, MAX_LENGTH)
    assert encoded.sequences == tuple((0, *prompt_ids, *ids) for ids in candidate_ids)
    assert encoded.option_lengths == tuple(len(ids) for ids in candidate_ids)


def test_the_majority_class_is_that_of_the_published_labels(data):
    task, validation = data
    examples = [task.build_example(record, row) for row, record in enumerate(validation)]
    assert majority_class_score(examples, accuracy) == MAJORITY[task.name]


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
        predicted += predictions(candidate_scores(logits, batch))
    assert accuracy(predicted, test) == 661 / 872
