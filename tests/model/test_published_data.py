"""The protocol on published records, with the tokens of a small OPT trained on English, and its
score."""

from __future__ import annotations

import pytest
import torch
from assets import shared_asset
from lezo_ds.data.encoding import encode_example, load_tokenizer
from lezo_ds.data.tables import read_file
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.metrics import accuracy
from transformers import AutoModelForCausalLM

from lezo_ds.config import DataConfig
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.objectives import candidate_scores
from lezo_ds.data.splits import load_splits

# task -> (row of validation, prompt, candidates, tokens of the prompt without BOS, tokens of each
# candidate); the prompts and candidates were worked out by hand, the tokens by the tokenizers
# library from the text.
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


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(shared_asset("models/opt-mini")))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_record_becomes_the_text_and_tokens_of_the_protocol(name, tokenizer):
    row, prompt, candidates, prompt_ids, candidate_ids = PUBLISHED[name]
    _, record = list(read_file(shared_asset(f"data/{name}") / "validation.jsonl"))[row]
    example = TASKS[name].example(record)
    assert (example.prompt, example.candidates) == (prompt, candidates)
    encoded = encode_example(tokenizer, example, 512)
    assert encoded.sequences == tuple((0, *prompt_ids, *ids) for ids in candidate_ids)
    assert encoded.option_lengths == tuple(len(ids) for ids in candidate_ids)


@torch.inference_mode()
def test_opt_mini_gets_47_of_64_right_without_training(tokenizer):
    data = DataConfig(path=str(shared_asset("data/sst2")), num_test=64)
    test = load_splits(TASKS["sst2"], data).test
    model = AutoModelForCausalLM.from_pretrained(
        shared_asset("models/opt-mini"), dtype=torch.float32
    ).eval()
    encoded = [encode_example(tokenizer, example, 512) for example in test]
    batch = candidate_batch(encoded, tokenizer.pad_id)
    chosen = batch.selection
    logits = model(**batch.inputs).logits[chosen.rows, chosen.positions][:, chosen.vocabulary]
    assert accuracy(candidate_scores(logits, batch).argmax(dim=1).tolist(), test) == 47 / 64
