from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from lezo_ds.data.batches import candidate_batch, teacher_forcing_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.objectives import (
    classification_loss,
    f1_loss,
    load_objective,
    predictions,
    reward,
    teacher_forcing_loss,
    training_objective,
)
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.tasks import TASKS
from lezo_ds.tasks.base import Example

PAD = 1
VOCABULARY = 64


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        init_std=0.5,
    )
    return OPTForCausalLM(config).eval()


def run(model, batch):
    """Return the logits the batch asks for."""
    logits = model(**batch.inputs).logits[batch.selection.rows, batch.selection.positions]
    return logits if batch.selection.vocabulary is None else logits[:, batch.selection.vocabulary]


def random_example(generator, candidate_lengths):
    """One example with candidates of these lengths behind a context of 1 to 20 random tokens."""

    def tokens(length):
        return tuple(torch.randint(4, VOCABULARY, (length,), generator=generator).tolist())

    context = (0, *tokens(int(torch.randint(0, 20, (), generator=generator))))
    label = int(torch.randint(0, len(candidate_lengths), (), generator=generator))
    sequences = tuple((*context, *tokens(length)) for length in candidate_lengths)
    return EncodedExample(sequences, tuple(candidate_lengths), label, truncated=False)


def one_token_examples():
    generator = torch.Generator().manual_seed(1)
    contexts = [random_example(generator, [1]).sequences[0][:-1] for _ in range(7)]
    return [
        EncodedExample(tuple((*context, token) for token in (40, 7, 23)), (1, 1, 1), row % 3, truncated=False)
        for row, context in enumerate(contexts)
    ]


def ragged_examples():
    generator = torch.Generator().manual_seed(2)
    shapes = [[1, 4], [3, 2, 5], [2], [1, 1, 1, 6], [7, 2]]
    return [random_example(generator, shape) for shape in shapes]


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["classification", "multiple_choice", "generation"])
@pytest.mark.parametrize("make_examples", [one_token_examples, ragged_examples])
def test_a_batch_gives_each_example_the_loss_it_has_alone(model, kind, make_examples):
    examples = make_examples()
    objective = training_objective(kind)
    together = objective.build_batch(examples, PAD)
    alone = [objective.build_batch([example], PAD) for example in examples]
    losses = objective.loss(run(model, together), together)
    expected = torch.cat([objective.loss(run(model, batch), batch) for batch in alone])
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
    assert together.weight == sum(batch.weight for batch in alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_losses_are_computed_in_float32_whatever_the_logits(dtype):
    logits = torch.randn(21, VOCABULARY, generator=torch.Generator().manual_seed(3)).to(dtype)
    for build, loss in (
        (candidate_batch, classification_loss),
        (teacher_forcing_batch, teacher_forcing_loss),
    ):
        batch = build(ragged_examples(), PAD)
        rows = logits[torch.arange(len(batch.selection.rows)) % len(logits)]
        losses = loss(rows, batch)
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses, loss(rows.float(), batch), rtol=0, atol=0)


def test_absent_candidates_leave_the_gradient_finite(model):
    batch = candidate_batch(ragged_examples(), PAD)
    logits = run(model, batch).detach().requires_grad_()
    classification_loss(logits, batch).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad.abs().sum() > 0


def test_the_best_candidate_wins_and_the_first_of_equals():
    absent = float("-inf")
    scores = torch.tensor([[-2.0, -1.0, -3.0], [-1.0, -1.0, absent], [-5.0, -4.0, -4.0]])
    assert predictions(scores) == [1, 0, 1]


def test_f1_as_a_loss_is_minus_the_best_f1_of_each_answer():
    examples = (
        Example("", (), None, 0, references=("red boat", "the big red boat")),
        Example("", (), None, 1, references=("42",)),
        Example("", (), None, 2, references=("rain",)),
    )
    losses = f1_loss(["A red boat.", "forty", "rain, rain"], MicroBatch({}, 3, examples=examples))
    torch.testing.assert_close(losses, torch.tensor([-1.0, 0.0, -2 / 3], dtype=torch.float64))


def halves(logits, batch):
    return torch.full((len(batch.examples),), 0.5)


@reward
def as_long_as_asked(answers, records):
    return [len(answer) == record["wanted"] for answer, record in zip(answers, records, strict=True)]


OWN = {
    "no losses": lambda logits, batch: torch.ones(len(batch.examples), dtype=torch.int64),
    "no numbers": reward(lambda answers, records: "abc"),
    "too few": reward(lambda answers, records: [1.0]),
    "not finite": reward(lambda answers, records: [0.5, float("nan")]),
    "absent": reward(lambda answers, records: [record["absent"] for record in records]),
}


def answered(*records):
    return MicroBatch({}, len(records), examples=tuple(Example("", (), None, 0, record=r) for r in records))


def test_objectives_are_those_of_the_task_or_named_in_a_module():
    for task in (TASKS["sst2"], TASKS["copa"], TASKS["squad"]):
        assert load_objective("task", task) == training_objective(task.kind)
    assert load_objective("f1", TASKS["squad"]).reads_answers
    objective = load_objective("test_objectives:halves", TASKS["copa"])
    batch = objective.build_batch(ragged_examples(), PAD)
    assert batch.weight == len(ragged_examples())
    assert (
        objective.loss(torch.zeros(3), replace(batch, examples=answered({}, {}).examples)).tolist()
        == [0.5] * 2
    )
    judged = load_objective("test_objectives:as_long_as_asked", TASKS["sst2"])
    assert (judged.reads_answers, judged.is_reward) == (True, True)
    assert judged.loss(["abc", ""], answered({"wanted": 3}, {"wanted": 3})).tolist() == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("halves", "train.objective=halves is not a registered objective"),
        ("no_such_package.module:f", "No module named 'no_such.*PYTHONPATH"),
        ("test_objectives:PAD", "TypeError: 1 is not"),
        ("f1", "train.objective=f1 needs a task that generates answers, not copa"),
    ],
)
def test_an_objective_that_does_not_exist_or_fit_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        load_objective(name, TASKS["copa"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no losses", r"returned torch.int64 \(2,\), not one loss per example"),
        ("no numbers", "returned abc, not one finite reward per answer"),
        ("too few", r"returned \[1.0\], not one finite reward"),
        ("not finite", r"returned \[0.5, nan\], not one finite reward"),
        ("absent", r"failed: KeyError: 'absent' \(.*test_objectives.py line \d+\)"),
    ],
)
def test_a_function_that_fails_is_named(name, message, monkeypatch):
    monkeypatch.setitem(globals(), "own", OWN[name])
    objective = load_objective("test_objectives:own", TASKS["sst2"])
    with pytest.raises(UserError, match=f"train.objective=test_objectives:own {message}"):
        objective.loss(["a", "b"], answered({}, {}))
