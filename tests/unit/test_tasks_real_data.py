"""The protocol on published records, with the tokens and losses of a small OPT trained on English."""

from __future__ import annotations

import pytest
import torch
from assets import shared_asset
from transformers import AutoModelForCausalLM

from lezo_ds.data.encoding import encode_example, encode_examples, encode_null, load_tokenizer
from lezo_ds.data.metrics import majority_class_rate
from lezo_ds.data.objectives import training_objective
from lezo_ds.data.records import load_records, sample_splits, with_demonstrations
from lezo_ds.tasks import TASKS

MAX_LENGTH = 512
NAMES = ("sst2", "rte", "cb", "boolq", "copa")

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


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(shared_asset("models/opt-mini"), dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=NAMES)
def data(request):
    task = TASKS[request.param]
    return task, *load_records(task, shared_asset(f"data/{task.name}"))


def test_a_published_record_becomes_the_text_and_tokens_of_the_protocol(data, tokenizer):
    task, _, validation = data
    row, prompt, candidates, prompt_ids, candidate_ids = PUBLISHED[task.name]
    example = task.build_example(validation[row], row)
    assert (example.prompt, example.candidates) == (prompt, candidates)
    encoded = encode_example(tokenizer, example, MAX_LENGTH)
    assert encoded.sequences == tuple((0, *prompt_ids, *ids) for ids in candidate_ids)
    assert encoded.option_lengths == tuple(len(ids) for ids in candidate_ids)


def test_every_published_record_can_be_encoded_and_calibrated(data, tokenizer):
    task, train, validation = data
    splits = sample_splits(task, train, validation, "clean", 0, num_train=32, num_dev=32, num_test=200)
    encoded = encode_examples(tokenizer, splits.train + splits.dev + splits.test, MAX_LENGTH)
    assert {example.sequences[0][0] for example in encoded} == {0}
    for example in splits.test:
        null = encode_null(tokenizer, example, MAX_LENGTH)
        assert null.option_lengths == encode_example(tokenizer, example, MAX_LENGTH).option_lengths


def test_the_majority_class_is_that_of_the_published_labels(data):
    task, _, validation = data
    examples = [task.build_example(record, row) for row, record in enumerate(validation)]
    assert majority_class_rate(examples) == MAJORITY[task.name]


def test_32_demonstrations_are_cut_on_the_left_and_leave_bos_and_question(data, tokenizer):
    task, train, validation = data
    splits = sample_splits(task, train, validation, "clean", 0, num_train=32, num_dev=32, num_test=20)
    asked = with_demonstrations(splits.test, splits.train)
    for example, plain in zip(asked, encode_examples(tokenizer, splits.test, MAX_LENGTH), strict=True):
        encoded = encode_example(tokenizer, example, MAX_LENGTH)
        assert encoded.option_lengths == plain.option_lengths
        for sequence, question in zip(encoded.sequences, plain.sequences, strict=True):
            assert sequence[0] == 0
            assert len(sequence) <= MAX_LENGTH
            assert sequence[1 - len(question) :] == question[1:]


@torch.inference_mode()
def test_the_loss_on_published_records_is_that_of_one_full_sequence_a_candidate(data, tokenizer, model):
    task, train, _ = data
    examples = [task.build_example(record, row) for row, record in enumerate(train[:4])]
    objective = training_objective(task.kind)
    encoded = encode_examples(tokenizer, examples, MAX_LENGTH)
    batch = objective.build_batch(encoded, tokenizer.pad_id)
    logits = model(**batch.inputs).logits[batch.selection.rows, batch.selection.positions]
    if batch.selection.vocabulary is not None:
        logits = logits[:, batch.selection.vocabulary]
    loss = objective.loss(logits, batch).sum() / batch.weight

    gold_tokens, losses = [], []
    for example in examples:
        token_scores = [
            candidate_log_probabilities(model, tokenizer, example, i) for i in range(len(example.candidates))
        ]
        means = torch.stack([scores.mean() for scores in token_scores])
        losses.append(-means.log_softmax(0)[example.label])
        gold_tokens.append(token_scores[example.label])
    expected = torch.stack(losses).mean() if task.kind == "classification" else -torch.cat(gold_tokens).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def candidate_log_probabilities(model, tokenizer, example, candidate):
    """The log-probability of each token of a candidate: one sequence, every logit, no padding."""
    split = tokenizer.backend.backend_tokenizer
    prompt = split.encode(example.prompt.strip(" "), add_special_tokens=False).ids
    whole = split.encode(
        (example.prompt + example.candidates[candidate]).strip(" "), add_special_tokens=False
    ).ids
    ids = torch.tensor([0, *whole][-MAX_LENGTH:])
    ids[0] = 0
    log_probabilities = model(ids[None]).logits[0].double().log_softmax(-1)
    places = range(len(ids) - (len(whole) - len(prompt)), len(ids))
    return torch.stack([log_probabilities[place - 1, ids[place]] for place in places])
