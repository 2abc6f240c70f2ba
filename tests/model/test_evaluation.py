"""Scoring in batches shared among ranks gives what plain PyTorch gives for one sequence at a
time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from lezo_ds.data.evaluation import evaluate
from lezo_ds.tasks.metrics import TokenCounts, best_f1
from own_data import PLAIN, write_conversations
from ranks import run_ranks
from tiny_runs import start_engine
from tiny_tasks import task_config, write_tasks, write_writer
from transformers import AutoModelForCausalLM

from lezo_ds.data.rewards import reward
from lezo_ds.data.task_data import load_task_data

pytestmark = pytest.mark.distributed
SIZES = (2, 64)
MAX_NEW_TOKENS, END, NEWLINE = 12, 2, 4


def misses(scores, batch):
    """An objective of logits: how far each example's candidates are apart."""
    return scores.max(dim=1).values.float() - scores.min(dim=1).values.float()


@reward
def brevity(answers, records):
    assert len(answers) == len(records)
    return [-len(answer) for answer in answers]


class Case(NamedTuple):
    folder: str
    model: str = "writer"
    changes: Mapping[str, Any] = MappingProxyType({})


# Candidates of one token each.
LETTERS = {
    "data__task": "custom",
    "data__prompt": "{sentence}\n",
    "data__label_field": "label",
    "data__labels": {"0": "x", "1": "y"},
}
CHAT = {"data__task": "custom", "data__messages": "turns", "data__num_test": 9}
INSTRUCTED = LETTERS | {"data__prompt": "Is this a good film or a bad one? {sentence}\n"}
WORDS = {"0": "good", "1": "bad"}
MEZO = {"data__protocol": "mezo"}
OWN = {"train__objective": "test_evaluation:misses"}
DEMONSTRATIONS = {"method": "icl", "data__num_demonstrations": 1}
CASES = {
    "one token": Case("sst2", "rotary", LETTERS),
    "one token, instructions": Case("sst2", "rotary", INSTRUCTED),
    "words, instructions": Case("sst2", changes=INSTRUCTED | {"data__labels": WORDS}),
    "own objective of logits": Case("sst2", "rotary", LETTERS | OWN),
    "many tokens": Case("cb", "rotary"),
    "demonstrations for each question": Case("cb", "rotary", MEZO | DEMONSTRATIONS),
    "multiple choice": Case("copa", changes=MEZO | {"data__num_test": 21}),
    "many candidates": Case("record"),
    "generation": Case("squad", changes=MEZO | {"data__num_test": 9}),
    "generation, F1 as the loss": Case("squad", "rotary", {"train__objective": "f1"}),
    "conversations": Case("chat", "rotary", CHAT | MEZO),
    "conversations, reward": Case(
        "chat", changes=CHAT | {"train__objective": "test_evaluation:brevity"}
    ),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Models that write varied answers, and data."""
    root = tmp_path_factory.mktemp("assets")
    write_writer(root / "writer", seed=3)
    write_writer(root / "rotary", "llama", seed=10, has_pad=False)
    write_tasks(root / "data")
    (root / "data" / "chat").mkdir()
    for split in ("train", "validation"):
        write_conversations(root / "data" / "chat" / f"{split}.jsonl")
    for model in ("writer", "rotary"):
        (root / model / "chat_template.jinja").write_text(PLAIN)
    return root


@pytest.fixture(scope="module")
def by_ranks(assets):
    """Results of all cases: {number of ranks: [{(case, batch size): result} of each rank]}."""
    return {
        1: run_ranks(evaluate_all, 1, assets, SIZES),
        2: run_ranks(evaluate_all, 2, assets, SIZES[:1]),
    }


def load(assets, case):
    changes = {"generation__max_new_tokens": MAX_NEW_TOKENS} | case.changes
    return load_task_data(task_config(assets / case.model, assets / "data", case.folder, **changes))


def evaluate_all(assets, sizes):
    """Evaluate all cases on every rank."""
    engines = {model: start_engine(assets / model, sparsity=0.0) for model in ("writer", "rotary")}
    data = {name: load(assets, case) for name, case in CASES.items()}
    return {
        (name, size): evaluate(engines[case.model], data[name].reader, data[name].test, size)
        for name, case in CASES.items()
        for size in sizes
    }


@torch.no_grad()
def token_logs(model, encoded):
    """Return the log-probability of every token of every candidate, and whether it is the most
    probable."""
    logs, firsts = [], []
    for number, ids in enumerate(encoded.sequences):
        rows = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
        logs.append([rows[i - 1, ids[i]].item() for i in encoded.targets(number)])
        firsts += [int(rows[i - 1].argmax()) == ids[i] for i in encoded.targets(number)]
    return logs, firsts


@torch.no_grad()
def written(model, data, prompt):
    """Return the plain greedy answer to one prompt: token by token, without a cache."""
    new = []
    while len(new) < MAX_NEW_TOKENS and not {END, NEWLINE} & set(new):
        new.append(int(model(input_ids=torch.tensor([[*prompt, *new]])).logits[0, -1].argmax()))
    answer = data.tokenizer.decode(new).rstrip()
    is_indented = answer.startswith("  ")
    return answer if is_indented else answer.strip()


def one_at_a_time(assets, case):
    """Return (loss, predictions, score) by the plain model."""
    data = load(assets, case)
    model = AutoModelForCausalLM.from_pretrained(assets / case.model, dtype=torch.float32).eval()
    split = data.test
    logs, firsts = zip(*(token_logs(model, encoded) for encoded in split.encoded), strict=True)
    answers = [written(model, data, prompt) for prompt in split.prompts]
    if data.task.kind == "generation":
        predicted = answers
        scores = [best_f1(a, e.references) for a, e in zip(answers, split.examples, strict=True)]
    elif data.task.kind == "chat":
        predicted = [TokenCounts(sum(tokens), len(tokens)) for tokens in firsts]
        scores = [is_first for tokens in firsts for is_first in tokens]
    else:
        predicted = choices(model, split, logs)
        pairs = zip(predicted, split.examples, strict=True)
        scores = [choice == e.label or e.candidates[choice] in e.references for choice, e in pairs]
    losses = {
        "task": lambda: task_loss(data, logs),
        "f1": lambda: -sum(scores) / len(scores),
        "test_evaluation:brevity": lambda: sum(map(len, answers)) / len(answers),
        "test_evaluation:misses": lambda: sum(max(ls)[0] - min(ls)[0] for ls in logs) / len(logs),
    }
    return (
        losses[case.changes.get("train__objective", "task")](),
        tuple(predicted),
        sum(scores) / len(scores),
    )


def choices(model, split, logs):
    scores = [[sum(log) / len(log) for log in example] for example in logs]
    return [example.index(max(example)) for example in scores]


def task_loss(data, logs):
    labels = [encoded.label for encoded in data.test.encoded]
    if data.task.kind == "classification":
        means = [
            torch.tensor([sum(log) / len(log) for log in example]).double() for example in logs
        ]
        losses = [
            -m.log_softmax(dim=0)[label].item() for m, label in zip(means, labels, strict=True)
        ]
        return sum(losses) / len(losses)
    # As the Trainer of transformers averages: a batch's mean counts once for each of its examples.
    golds = [example[label] for example, label in zip(logs, labels, strict=True)]
    size = data.reader.loss_batch or len(golds)
    parts = [golds[start : start + size] for start in range(0, len(golds), size)]
    return sum(-sum(map(sum, part)) / sum(map(len, part)) * len(part) for part in parts) / len(
        golds
    )


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(", instructions")])
def test_instructions_are_read_once_in_a_batch(name, assets):
    case = CASES[name]
    data = load(assets, case)
    engine = start_engine(assets / case.model, sparsity=0.0)
    shapes = []
    block = engine.module.get_submodule(engine.layout.path)[1]
    block.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape[:2])))
    evaluate(engine, data.reader, data.test, 64)
    num_start = data.test.num_start
    assert num_start == 1 + len("Is this a good film or a bad one? ")  # after <s>
    contexts = {ids[:-1] for encoded in data.test.encoded for ids in encoded.sequences}
    num_own = sum(len(ids) - num_start for ids in contexts)
    ((num_rows, width),) = shapes
    assert num_rows == 1 and width < num_start + num_own + 8


@pytest.mark.parametrize("name", CASES)
def test_batched_scoring_equals_one_at_a_time(name, by_ranks, assets):
    loss, predicted, score = one_at_a_time(assets, CASES[name])
    assert len(set(predicted)) > 1  # else a scorer that always chose the first candidate might pass
    labels = [example.label for example in load(assets, CASES[name]).test.examples]
    most = max(labels.count(label) for label in labels) / len(labels)
    for size in SIZES:
        result = by_ranks[1][0][name, size]
        assert result.predicted == predicted
        assert result.score == pytest.approx(score, rel=1e-12)
        assert result.loss == pytest.approx(loss, rel=1e-5)
        assert result.majority_class == (
            None if CASES[name].folder in ("record", "squad", "chat") else most
        )


def test_the_number_of_ranks_changes_no_bit_of_a_result_and_every_rank_has_it(by_ranks):
    alone = {key: result for key, result in by_ranks[1][0].items() if key[1] == SIZES[0]}
    assert by_ranks[2] == [alone, alone]
