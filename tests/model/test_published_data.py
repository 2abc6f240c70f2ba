"""The protocol on published records, with the tokens of a small OPT trained on English, and its
score."""

from __future__ import annotations

import pytest
import torch
from assets import shared_asset
from transformers import AutoModelForCausalLM

from lezo_ds.config import config_from_dict
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.dataset import Examples
from lezo_ds.data.encode import encode_candidates, load_tokenizer
from lezo_ds.data.metrics import accuracy
from lezo_ds.data.mezo import TASKS
from lezo_ds.data.objectives import candidate_scores
from lezo_ds.data.records import read_records

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
    record = list(read_records(str(shared_asset(f"data/{name}") / "validation.jsonl")))[row]
    example = TASKS[name].example(record)
    assert (example.prompt, example.candidates) == (prompt, candidates)
    encoded = encode_candidates(tokenizer, example, 512)
    assert encoded.sequences == tuple((0, *prompt_ids, *ids) for ids in candidate_ids)
    assert encoded.option_lengths == tuple(len(ids) for ids in candidate_ids)


@torch.inference_mode()
def test_opt_mini_gets_47_of_64_right_without_training(tokenizer):
    values = {
        "run_dir": "none",
        "model": {"path": str(shared_asset("models/opt-mini")), "dtype": "fp32"},
        "data": {"path": str(shared_asset("data/sst2")), "num_test": 64, "max_length": 512},
    }
    test = Examples(config_from_dict(values, "the test")).split("test")
    model = AutoModelForCausalLM.from_pretrained(
        shared_asset("models/opt-mini"), dtype=torch.float32
    ).eval()
    batch = candidate_batch(list(test.encoded), tokenizer.pad_id)
    chosen = batch.selection
    logits = model(**batch.inputs).logits[chosen.rows, chosen.positions][:, chosen.vocabulary]
    assert (
        accuracy(candidate_scores(logits, batch).argmax(dim=1).tolist(), test.examples) == 47 / 64
    )
