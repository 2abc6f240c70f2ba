import sys
from dataclasses import replace

import pytest
import torch

from lezo_ds.data.examples import EncodedExample, Example
from lezo_ds.data.mezo import TASKS
from lezo_ds.data.objectives import LOSSES, f1_loss, load_objective, training_objective
from lezo_ds.data.rewards import reward
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch

PAD = 1
VOCABULARY = 64


EXAMPLES = [
    EncodedExample(((0, 5, 8), (0, 5, 9, 10)), ((0, 0, 1), (0, 0, 1, 1)), 0),
    EncodedExample(((0, 6, 11, 12),), ((0, 0, 1, 1),), 0),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_finite_gradients_are_computed_in_float32_whatever_the_logits(loss, dtype):
    objective = LOSSES[loss]
    batch = objective.build_batch(EXAMPLES, PAD)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(batch.selection.rows), VOCABULARY, generator=generator)
    logits = logits.to(dtype).requires_grad_()
    losses = objective.loss(logits, batch)
    torch.testing.assert_close(losses, objective.loss(logits.float(), batch), rtol=0, atol=0)
    losses.sum().backward()
    assert logits.grad.isfinite().all()  # also of an example with fewer candidates than others


def test_f1_as_a_loss_is_minus_the_best_f1_of_each_answer():
    examples = (
        Example("", (), None, references=("red boat", "the big red boat")),
        Example("", (), None, references=("42",)),
        Example("", (), None, references=("rain",)),
    )
    losses = f1_loss(["A red boat.", "forty", "rain, rain"], MicroBatch({}, 3, examples=examples))
    torch.testing.assert_close(losses, torch.tensor([-1.0, 0.0, -2 / 3], dtype=torch.float64))


def halves(logits, batch):
    return torch.full((len(batch.examples),), 0.5)


@reward
def as_long_as_asked(answers, records):
    pairs = zip(answers, records, strict=True)
    return [len(answer) == record["wanted"] for answer, record in pairs]


def interrupted(answers, records):
    raise KeyboardInterrupt


OWN = {
    "no losses": lambda logits, batch: torch.ones(len(batch.examples), dtype=torch.int64),
    "absent": reward(lambda answers, records: [record["absent"] for record in records]),
    "exit": reward(lambda answers, records: sys.exit(0)),
    "interrupt": reward(interrupted),
}


def answered(*records):
    examples = tuple(Example("", (), None, record=record) for record in records)
    return MicroBatch({}, len(records), examples=examples)


def test_objectives_are_those_of_the_task_or_named_in_a_module():
    for task in (TASKS["sst2"], TASKS["copa"], TASKS["squad"]):
        assert load_objective("task", task) == training_objective(task)
    assert load_objective("f1", TASKS["squad"]).reads_answers
    objective = load_objective("test_objectives:halves", TASKS["copa"])
    batch = objective.build_batch(EXAMPLES, PAD)
    assert batch.weight == len(EXAMPLES)
    assert objective.loss(torch.zeros(3), answered({}, {})).tolist() == [0.5] * 2
    judged = load_objective("test_objectives:as_long_as_asked", TASKS["sst2"])
    assert (judged.reads_answers, judged.is_reward) == (True, True)
    assert judged.loss(["abc", ""], answered({"wanted": 3}, {"wanted": 3})).tolist() == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("no losses", UserError, r"own returned tensor\(\[1, 1\]\), not one loss per example"),
        ("absent", UserError, r"own failed: KeyError: 'absent' \(.*test_objectives.py line \d+\)"),
        ("exit", UserError, "own failed: SystemExit: 0 "),
        ("interrupt", KeyboardInterrupt, ""),
    ],
)
def test_a_function_that_fails_is_named_and_an_interrupt_in_it_is_one(
    name, error, message, monkeypatch
):
    monkeypatch.setitem(globals(), "own", OWN[name])
    objective = load_objective("test_objectives:own", TASKS["sst2"])
    with pytest.raises(error, match=message):
        objective.loss(["a", "b"], answered({}, {}))


def test_an_objective_that_changes_its_batch_gets_the_same_one_again(monkeypatch):
    def spoils(logits, batch):
        batch.examples[0].record["wanted"].append(1)
        batch.labels["label"] += 1
        return batch.labels["label"].double()

    monkeypatch.setitem(globals(), "own", spoils)
    objective = load_objective("test_objectives:own", TASKS["sst2"])
    batch = replace(answered({"wanted": []}), labels={"label": torch.tensor([1])})
    assert [objective.loss(torch.zeros(1), batch).tolist() for _ in range(2)] == [[2.0], [2.0]]
    assert batch.examples[0].record == {"wanted": []}
