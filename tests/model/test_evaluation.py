"""Scoring in batches shared among ranks gives what plain PyTorch gives for one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from assets import write_data, write_reader
from chats import PLAIN, write_conversations
from ranks import run_ranks
from tiny_runs import start_engine
from tiny_tasks import task_config, write_tasks, write_writer
from transformers import AutoModelForCausalLM

from lezo_ds.data.evaluation import evaluate
from lezo_ds.data.objectives import reward
from lezo_ds.data.task_data import load_task_data
from lezo_ds.tasks.metrics import TokenCounts, best_f1

BATCH_SIZES = {1: (2, 64), 2: (2,)}
"""By the number of ranks."""


def misses(scores, batch):
    """An objective of logits: how far each example's candidates are apart."""
    return scores.max(dim=1).values.float() - scores.min(dim=1).values.float()


@reward
def brevity(answers, records):
    """A reward: how short an answer is."""
    assert len(answers) == len(records)
    return [-len(answer) for answer in answers]


@dataclass(frozen=True)
class Case:
    """What is scored by which model, and changes to the configuration."""

    task: str
    model: str = "writer"
    changes: tuple[tuple[str, object], ...] = ()


CONVERSATIONS = (("data__messages", "turns"), ("data__num_test", 9))

CASES = {
    "one token": Case("sst2", "reader"),
    "one token, calibrated": Case("sst2", "reader", (("method", "zero_shot_sfc"),)),
    "many tokens": Case("cb", "rotary"),
    "multiple choice": Case("copa"),
    "many candidates, calibrated": Case("record", changes=(("method", "zero_shot_sfc"),)),
    "demonstrations for each question, calibrated with them": Case(
        *("cb", "writer"),
        (
            *(("method", "icl_sfc"), ("data__num_demonstrations", 1), ("data__max_length", 256)),
            ("data__protocol", "mezo"),
        ),
    ),
    "MeZO's details": Case("copa", changes=(("data__protocol", "mezo"), ("data__num_test", 21))),
    "MeZO's details, generation": Case("squad", changes=(("data__protocol", "mezo"), ("data__num_test", 9))),
    "generation": Case("squad"),
    "generation, F1 as the loss": Case("squad", "rotary", (("train__objective", "f1"),)),
    "conversations": Case("custom", "rotary", CONVERSATIONS),
    "conversations, MeZO's details": Case("custom", changes=(*CONVERSATIONS, ("data__protocol", "mezo"))),
    "conversations, reward": Case(
        "custom", changes=(*CONVERSATIONS, ("train__objective", "test_evaluation:brevity"))
    ),
    "own objective of logits": Case("sst2", "reader", (("train__objective", "test_evaluation:misses"),)),
    "reward": Case("cb", "rotary", (("train__objective", "test_evaluation:brevity"),)),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Models that give varied answers, and data."""
    root = tmp_path_factory.mktemp("assets")
    reader = AutoModelForCausalLM.from_pretrained(write_reader(root / "reader", seed=2))
    for matrix in (weight.data for weight in reader.parameters() if weight.ndim == 2):
        matrix *= 4  # else it gives all sentences the same label
    reader.save_pretrained(root / "reader")
    write_writer(root / "writer", seed=3)
    write_writer(root / "rotary", "llama", seed=10)
    write_tasks(root / "data")
    write_data(root / "data" / "sst2")
    (root / "data" / "custom").mkdir()
    for split in ("train", "validation"):
        write_conversations(root / "data" / "custom" / f"{split}.jsonl")
    for model in ("writer", "rotary"):
        (root / model / "chat_template.jinja").write_text(PLAIN)
    return root


@pytest.fixture(scope="module")
def by_ranks(assets):
    """Results of all cases on 1 and on 2 ranks: {number of ranks: [{(case, batch size): result}, ...]}."""
    return {n: run_ranks(evaluate_all, n, assets, sizes) for n, sizes in BATCH_SIZES.items()}


@pytest.fixture(scope="module")
def expected(assets):
    """Return {case: (loss, predictions, score)} by the plain models."""
    return {name: one_at_a_time(assets, case) for name, case in CASES.items()}


def load(assets, case):
    reader = {"data__max_length": 64, "data__num_test": 20} if case.model == "reader" else {}
    changes = reader | dict(case.changes)
    return load_task_data(task_config(assets / case.model, assets / "data", case.task, **changes))


def evaluate_all(assets, sizes):
    """Evaluate on every rank; what each rank gets."""
    results = {}
    for model in ("reader", "writer", "rotary"):
        engine = start_engine(assets / model, sparsity=0.0)
        for name, case in CASES.items():
            if case.model == model:
                data = load(assets, case)
                for size in sizes:
                    results[name, size] = evaluate(engine, data, data.test, size)
    return results


@torch.no_grad()
def token_logs(model, encoded):
    """Return the log-probability of every token of every candidate, by one full forward pass each."""
    found = []
    for place, ids in enumerate(encoded.sequences):
        logs = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
        found.append([logs[i - 1, ids[i]].item() for i in encoded.targets(place)])
    return found


@torch.no_grad()
def right_tokens(model, encoded):
    """Return whether each token of the assistant is the model's first choice."""
    (ids,) = encoded.sequences
    best = model(input_ids=torch.tensor([ids])).logits[0].argmax(dim=-1).tolist()
    return [best[i - 1] == ids[i] for i in encoded.targets(0)]


@torch.no_grad()
def written(model, data, prompt):
    """Return the plain greedy answer to one prompt: token by token, without a cache."""
    new, end, newline = [], 2, 4
    while len(new) < 50 and not {end, newline} & set(new):
        new.append(int(model(input_ids=torch.tensor([[*prompt, *new]])).logits[0, -1].argmax()))
    return data.tokenizer.decode(new).strip()


def one_at_a_time(assets, case):
    """Return (loss, predictions, score) by the plain model."""
    data = load(assets, case)
    model = AutoModelForCausalLM.from_pretrained(assets / case.model, dtype=torch.float32).eval()
    split = data.test
    logs = [token_logs(model, encoded) for encoded in split.encoded]
    answers = [written(model, data, prompt) for prompt in split.prompts]
    if data.task.kind == "generation":
        scores = [best_f1(a, e.references) for a, e in zip(answers, split.examples, strict=True)]
        predicted = answers
    elif data.task.kind == "chat":
        right = [right_tokens(model, encoded) for encoded in split.encoded]
        predicted = [TokenCounts(sum(tokens), len(tokens)) for tokens in right]
        scores = [is_right for tokens in right for is_right in tokens]
    else:
        predicted = choices(model, split, logs)
        pairs = list(zip(predicted, split.examples, strict=True))
        scores = [choice == e.label or e.candidates[choice] in e.references for choice, e in pairs]
    losses = {
        "task": partial(task_loss, data.task.kind, split, logs, data.loss_batch),
        "f1": lambda: -sum(scores) / len(scores),
        "test_evaluation:brevity": lambda: sum(map(len, answers)) / len(answers),
        "test_evaluation:misses": lambda: sum(max(ls)[0] - min(ls)[0] for ls in logs) / len(logs),
    }
    objective = dict(case.changes).get("train__objective", "task")
    return losses[objective](), tuple(predicted), sum(scores) / len(scores)


def choices(model, split, logs):
    if split.null_encoded:
        nulls = [token_logs(model, encoded) for encoded in split.null_encoded]
        found = [
            [sum(log) - sum(null) for log, null in zip(*pair, strict=True)]
            for pair in zip(logs, nulls, strict=True)
        ]
    else:
        found = [[sum(log) / len(log) for log in example] for example in logs]
    return [scores.index(max(scores)) for scores in found]


def task_loss(kind, split, logs, loss_batch):
    golds = [example[e.label] for example, e in zip(logs, split.encoded, strict=True)]
    if kind != "classification":
        # As the Trainer of transformers averages: a batch's mean counts once for each of its examples.
        size = loss_batch or len(golds)
        parts = [golds[start : start + size] for start in range(0, len(golds), size)]
        means = [-sum(map(sum, part)) / sum(map(len, part)) for part in parts]
        return sum(mean * len(part) for mean, part in zip(means, parts, strict=True)) / len(golds)
    losses = []
    for example, encoded in zip(logs, split.encoded, strict=True):
        means = torch.tensor([sum(log) / len(log) for log in example], dtype=torch.float64)
        losses.append(-means.log_softmax(dim=0)[encoded.label].item())
    return sum(losses) / len(losses)


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_batched_scoring_equals_one_at_a_time(name, by_ranks, expected):
    loss, predicted, score = expected[name]
    for size in BATCH_SIZES[1]:
        result = by_ranks[1][0][name, size]
        assert result.predicted == predicted
        assert result.score == pytest.approx(score, rel=1e-12)
        assert result.loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.distributed
def test_the_number_of_ranks_changes_no_bit_of_a_result_and_every_rank_has_it(by_ranks):
    (found,) = by_ranks[1]
    alone = {(name, size): result for (name, size), result in found.items() if size in BATCH_SIZES[2]}
    assert by_ranks[2] == [alone, alone]


@pytest.mark.distributed
def test_the_majority_class_rate_counts_the_examples_scored_where_there_are_classes(by_ranks, assets):
    for name, case in CASES.items():
        labels = [example.label for example in load(assets, case).test.examples]
        most = max(labels.count(label) for label in labels)
        rate = None if case.task in ("record", "squad", "custom") else most / len(labels)
        assert by_ranks[1][0][name, 2].majority_class == rate


@pytest.mark.distributed
def test_the_cases_are_no_trivial_ones(by_ranks):
    """Else a scorer that always chose the first candidate, or wrote one answer, might pass."""
    for name in CASES:
        assert len(set(by_ranks[1][0][name, 2].predicted)) > 1, name
