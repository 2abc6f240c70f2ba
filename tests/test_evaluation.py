"""Scoring in batches shared among ranks gives what scoring one example at a time in plain PyTorch gives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from assets import write_reader
from ranks import run_ranks
from tiny_runs import start_engine
from transformers import AutoModelForCausalLM

from lezo_ds.demo.corpus import review
from lezo_ds.encoding import encode_examples, load_tokenizer
from lezo_ds.evaluation import evaluate
from lezo_ds.objectives import training_objective
from lezo_ds.task_data import EncodedSplit, TaskData
from lezo_ds.tasks.base import Example
from lezo_ds.tasks.sst2 import SST2

NUM_EXAMPLES = 11
CANDIDATES = {
    "one_token": (" terrible", " great"),
    "many_tokens": (" terrible", " really great film", " never dull"),
}
CASES = [
    ("one_token", "classification", NUM_EXAMPLES),
    ("many_tokens", "classification", NUM_EXAMPLES),
    ("many_tokens", "multiple_choice", NUM_EXAMPLES),
    ("many_tokens", "classification", 1),
]
BATCH_SIZES = (1, 3, 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_reader(tmp_path_factory.mktemp("model"), seed=9)  # one that gives varied answers


@pytest.fixture(scope="module")
def by_ranks(model):
    """Results of all cases on 1 and on 2 ranks: {number of ranks: [{(case, batch size): result}, ...]}."""
    return {num_ranks: run_ranks(evaluate_all, num_ranks, model) for num_ranks in (1, 2)}


def make_examples(candidates, num_examples):
    rng = random.Random(0)
    examples = []
    for index in range(num_examples):
        # Without the words that all prompts end in, or a random model answers all alike.
        prompt = review(rng, positive=bool(index % 2)).removesuffix(" .")
        shown = CANDIDATES[candidates]
        if candidates == "many_tokens":  # in another order each time, for the same reason
            shown = tuple(rng.sample(shown, len(shown)))
        examples.append(Example(prompt, shown, rng.randrange(len(shown)), index))
    return examples


def encode(directory, examples):
    tokenizer = load_tokenizer(str(directory))
    return encode_examples(tokenizer, examples, max_length=64), tokenizer


def evaluate_all(directory):
    """Evaluate on every rank; what each rank gets."""
    engine = start_engine(directory)
    results = {}
    for case in CASES:
        candidates, kind, num_examples = case
        examples = make_examples(candidates, num_examples)
        encoded, tokenizer = encode(directory, examples)
        split = EncodedSplit(tuple(examples), encoded)
        objective = training_objective(kind)
        data = TaskData(replace(SST2, kind=kind), tokenizer, split, split, split, objective)
        for size in BATCH_SIZES:
            results[case, size] = evaluate(engine, data, data.test, size)
    return results


def one_at_a_time(directory, candidates, kind, num_examples):
    """Return (mean loss, predictions, accuracy) by the plain model, a sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    examples = make_examples(candidates, num_examples)
    total = weight = 0.0
    predicted = []
    for example in encode(directory, examples)[0]:
        token_logs = []
        for ids, length in zip(example.sequences, example.option_lengths, strict=True):
            with torch.no_grad():
                logs = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
            token_logs.append([logs[i - 1, ids[i]].item() for i in range(len(ids) - length, len(ids))])
        means = torch.tensor([sum(logs) / len(logs) for logs in token_logs], dtype=torch.float64)
        predicted.append(int(means.argmax()))
        if kind == "classification":
            total -= means.log_softmax(dim=0)[example.label].item()
            weight += 1
        else:
            total -= sum(token_logs[example.label])
            weight += len(token_logs[example.label])
    right = [choice == example.label for choice, example in zip(predicted, examples, strict=True)]
    return total / weight, tuple(predicted), sum(right) / len(right)


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_batched_and_shared_scoring_equals_one_at_a_time(num_ranks, case, by_ranks, model):
    loss, predicted, accuracy = one_at_a_time(model, *case)
    for size in BATCH_SIZES:
        result = by_ranks[num_ranks][0][case, size]
        assert result.predicted == predicted
        assert result.score == accuracy
        assert result.loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.distributed
def test_the_number_of_ranks_changes_no_bit_of_a_result_and_every_rank_has_it(by_ranks):
    (alone,) = by_ranks[1]
    assert by_ranks[2] == [alone, alone]


@pytest.mark.distributed
def test_the_majority_class_rate_counts_the_examples_scored(by_ranks):
    for case in CASES:
        labels = [example.label for example in make_examples(case[0], case[2])]
        most = max(labels.count(label) for label in labels)
        assert by_ranks[1][0][case, 3].majority_class == most / len(labels)


@pytest.mark.distributed
def test_the_cases_are_no_trivial_ones(by_ranks):
    """Else a scorer that always chose the first candidate might pass."""
    for case in CASES[:3]:
        assert len(set(by_ranks[1][0][case, 1].predicted)) > 1
