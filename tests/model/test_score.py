"""Scoring in batches shared among ranks gives what plain PyTorch gives for one sequence alone."""

import types
from statistics import fmean
from typing import NamedTuple

import pytest
import torch
from assets import shared_asset, write_records
from own_data import PLAIN, own_config, write_byte_model, write_conversations
from own_kind import STARS
from ranks import run_ranks
from tiny_models import greedy
from tiny_runs import start_engine
from tiny_tasks import task_config, write_tasks, write_writer
from transformers import AutoModelForCausalLM

from lezo_ds.config import config_from_dict
from lezo_ds.data.dataset import Examples
from lezo_ds.data.examples import TokenCounts
from lezo_ds.data.metrics import best_f1
from lezo_ds.data.rewards import reward
from lezo_ds.data.score import Scorer, evaluate, predict

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


def of_odd_answers(completions, **fields):
    """A reward of TRL's, which does not apply to some answers."""
    return list(map(worth, completions))


def worth(answer):
    return len(answer) + answer.count("z") if answer.count("z") % 2 else None


class Case(NamedTuple):
    folder: str
    model: str = "writer"
    changes: dict = types.MappingProxyType({})


# Candidates of one token each.
LETTERS = {"data__task": "custom", "data__prompt": "{sentence}\n", "data__label_field": "label"}
LETTERS |= {"data__labels": {"0": "x", "1": "y"}}
CHAT = {"data__task": "custom", "data__messages": "turns", "data__num_test": 9}
INSTRUCTED = LETTERS | {"data__prompt": "Is this a good film or a bad one? {sentence}\n"}
WORDS = {"0": "good", "1": "bad"}
MEZO = {"data__protocol": "mezo"}
OWN = {"train__objective": "test_score:misses"}
DEMONSTRATIONS = {"data__num_demonstrations": 1}
PARTLY = {"train__objective": "test_score:of_odd_answers"}
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
    "reward of some answers": Case("squad", changes=PARTLY | {"data__num_test": 21}),
    "conversations": Case("chat", "rotary", CHAT | MEZO),
    "reward": Case("squad", changes={"train__objective": "test_score:brevity"}),
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
    alone = run_ranks(evaluate_all, 1, assets, SIZES)
    return {1: alone, 2: run_ranks(evaluate_all, 2, assets, SIZES[:1])}


def load(assets, case):
    changes = {"generation__max_new_tokens": MAX_NEW_TOKENS} | case.changes
    config = task_config(assets / case.model, assets / "data", case.folder, **changes)
    examples = Examples(config, "test")
    return examples.reader, examples.split("test")


def evaluate_all(assets, sizes):
    """Evaluate all cases on every rank."""
    engines = {model: start_engine(assets / model, sparsity=0.0) for model in ("writer", "rotary")}
    data = {name: load(assets, case) for name, case in CASES.items()}
    return {
        (name, size): evaluate(engines[case.model], *data[name], size)
        for name, case in CASES.items()
        for size in sizes
    }


@torch.no_grad()
def token_logs(model, encoded):
    """Return the log-probability of every token, and whether it is the most probable."""
    logs, firsts = [], []
    for number, ids in enumerate(encoded.sequences):
        rows = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
        logs.append([rows[i - 1, ids[i]].item() for i in encoded.targets(number)])
        firsts += [int(rows[i - 1].argmax()) == ids[i] for i in encoded.targets(number)]
    return logs, firsts


def first_line(model, reader, prompt):
    """Return the first line of the plain greedy answer to one prompt."""
    ids = greedy(model, prompt, MAX_NEW_TOKENS, stop_ids=(END, NEWLINE))
    return reader.tokenizer.decode(ids).split("\n")[0]


def one_at_a_time(assets, case):
    """Return (loss, predictions, score) by the plain model."""
    reader, split = load(assets, case)
    model = AutoModelForCausalLM.from_pretrained(assets / case.model, dtype=torch.float32).eval()
    pairs = [token_logs(model, encoded) for encoded in split.encoded]
    logs, firsts = zip(*pairs, strict=True)
    objective = case.changes.get("train__objective", "task")
    loss = None
    if reader.task.kind == "generation":
        whole = [first_line(model, reader, prompt) for prompt in split.prompts]
        predicted = [each.rstrip() if each.startswith("  ") else each.strip() for each in whole]
        pairs = zip(predicted, split.examples, strict=True)
        scores = [best_f1(answer, example.references) for answer, example in pairs]
        losses = {
            "f1": [-score for score in scores],
            "test_score:brevity": list(map(len, predicted)),
            "test_score:of_odd_answers": [-w for w in map(worth, whole) if w is not None],
        }
        loss = fmean(losses[objective]) if objective in losses else None
    elif reader.task.kind == "chat":
        predicted = [TokenCounts(sum(tokens), len(tokens)) for tokens in firsts]
        scores = [is_first for tokens in firsts for is_first in tokens]
    else:
        means = [[fmean(log) for log in example] for example in logs]
        predicted = [example.index(max(example)) for example in means]
        pairs = zip(predicted, split.examples, strict=True)
        scores = [choice == e.label or e.candidates[choice] in e.references for choice, e in pairs]
    if objective == "test_score:misses":
        loss = fmean(max(ls)[0] - min(ls)[0] for ls in logs)
    return task_loss(reader, split, logs) if loss is None else loss, tuple(predicted), fmean(scores)


def task_loss(reader, split, logs):
    labels = [encoded.label for encoded in split.encoded]
    pairs = zip(logs, labels, strict=True)
    if reader.task.kind == "classification":
        means = [(torch.tensor([fmean(log) for log in example]), label) for example, label in pairs]
        return fmean(-each.double().log_softmax(dim=0)[label].item() for each, label in means)
    # As the Trainer of transformers averages: a batch's mean counts once for each of its examples.
    golds = [example[label] for example, label in pairs]
    size = 8 if reader.config.data.protocol == "mezo" else len(golds)
    parts = [golds[start : start + size] for start in range(0, len(golds), size)]
    sums = [-sum(map(sum, part)) / sum(map(len, part)) * len(part) for part in parts]
    return sum(sums) / len(golds)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(", instructions")])
def test_instructions_are_read_once_in_a_batch(name, assets):
    case = CASES[name]
    reader, split = load(assets, case)
    engine = start_engine(assets / case.model, sparsity=0.0)
    shapes = []
    block = engine.module.get_submodule(engine.layout.path)[1]
    block.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape[:2])))
    evaluate(engine, reader, split, 64)
    assert split.num_start == 1 + len("Is this a good film or a bad one? ")  # after <s>
    contexts = {ids[:-1] for encoded in split.encoded for ids in encoded.sequences}
    num_own = sum(len(ids) - split.num_start for ids in contexts)
    ((num_rows, width),) = shapes
    assert num_rows == 1 and width < split.num_start + num_own + 8


@pytest.mark.parametrize("name", CASES)
def test_batched_scoring_equals_one_at_a_time(name, by_ranks, assets):
    loss, predicted, score = one_at_a_time(assets, CASES[name])
    assert len(set(predicted)) > 1  # else a scorer that always chose the first candidate might pass
    _, split = load(assets, CASES[name])
    labels = [example.label for example in split.examples]
    most = max(labels.count(label) for label in labels) / len(labels)
    has_references = CASES[name].folder in ("record", "squad", "chat")
    for size in SIZES:
        result = by_ranks[1][0][name, size]
        assert result.predicted == predicted
        assert result.score == pytest.approx(score, rel=1e-12)
        assert result.loss == pytest.approx(loss, rel=1e-5)
        assert result.majority_class == (None if has_references else most)


def test_the_number_of_ranks_changes_no_bit_of_a_result_and_every_rank_has_it(by_ranks):
    alone = {key: result for key, result in by_ranks[1][0].items() if key[1] == SIZES[0]}
    assert by_ranks[2] == [alone, alone]


def test_answers_without_a_reward_are_counted_and_leave_the_mean_to_the_others(assets, caplog):
    changes = {"data__metric": "reward", "data__num_test": 21}
    several = {"test_score:brevity": 1.0, "test_score:of_odd_answers": 1.0}
    reader, split = load(assets, Case("squad", changes=PARTLY | changes))
    engine = start_engine(assets / "writer", sparsity=0.0)
    result = evaluate(engine, reader, split, 4)
    model = AutoModelForCausalLM.from_pretrained(assets / "writer", dtype=torch.float32).eval()
    rewards = [worth(first_line(model, reader, ids)) for ids in split.prompts]
    judged = [each for each in rewards if each is not None]
    assert 0 < len(judged) < len(rewards)
    assert (result.score, result.loss) == pytest.approx((fmean(judged), -fmean(judged)))
    assert f"{21 - len(judged)} of 21 answers have no reward" in caplog.text
    assert [sample["reward"] for sample in result.samples] == rewards[:4]
    of_both = Case("squad", changes=changes | {"train__objective": several})
    both = evaluate(engine, *load(assets, of_both), 4)
    assert both.rewards["of_odd_answers"] == pytest.approx(fmean(judged))
    assert both.samples[0]["rewards"]["of_odd_answers"] == rewards[0]


def test_answers_that_are_almost_all_alike_are_named(assets, caplog):
    silent = {"generation__stop": ["x", "y", "z", "\n", " "], "data__num_test": 21}
    reader, split = load(assets, Case("squad", changes=silent | {"train__objective": "f1"}))
    result = evaluate(start_engine(assets / "writer", sparsity=0.0), reader, split, 64)
    assert result.numbers["num_different"] == 1
    assert "only 1 of the answers to 21 prompts are different" in caplog.text


def test_a_kind_of_ones_own_is_scored_and_predicted_by_its_own_methods(tmp_path):
    model_path = write_byte_model(tmp_path / "model")
    rows = [{"text": f"Film {n} is {'so ' * (n % 3)}fine.", "stars": 1 + n % 5} for n in range(24)]
    write_records(tmp_path / "reviews.jsonl", rows)
    keys = {"task": "own_kind:RATING", "num_test": 8}
    examples = Examples(own_config(model_path, tmp_path / "reviews.jsonl", **keys))
    reader, split = examples.reader, examples.split("test")
    engine = start_engine(model_path, sparsity=0.0)
    result = evaluate(engine, reader, split, 4)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    expected = []
    for encoded in split.encoded:
        logs, _ = token_logs(model, encoded)
        shares = torch.tensor([fmean(log) for log in logs]).softmax(dim=0).tolist()
        expected.append(sum(star * share for star, share in zip(STARS, shares, strict=True)))
    assert result.predicted == pytest.approx(expected, rel=1e-4)
    scorer = Scorer(engine, reader, split, 4)  # as in training
    assert scorer.objective_loss() == pytest.approx(result.loss, rel=1e-6)
    errors = [a - e.record["stars"] for a, e in zip(expected, split.examples, strict=True)]
    assert result.loss == pytest.approx(fmean(error**2 for error in errors), rel=1e-4)
    assert result.score == pytest.approx(1 - fmean(map(abs, errors)) / 4, rel=1e-4)
    found = [row["predicted"] for row in predict(engine, reader, split, 4)]
    assert found == pytest.approx(expected, abs=0.006)


def test_opt_mini_gets_47_of_64_published_records_right_without_training():
    """A small OPT that was trained on English."""
    path = str(shared_asset("models/opt-mini"))
    data = {"path": str(shared_asset("data/sst2")), "num_test": 64, "max_length": 512}
    values = {"run_dir": "none", "model": {"path": path, "dtype": "fp32"}, "data": data}
    examples = Examples(config_from_dict(values, "the test"))
    result = evaluate(start_engine(path), examples.reader, examples.split("test"), 16)
    assert result.score == 47 / 64
