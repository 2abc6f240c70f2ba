from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from lezo_ds.data import objectives
from lezo_ds.data.batches import candidate_batch, teacher_forcing_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.objectives import (
    classification_loss,
    f1_loss,
    load_objective,
    predictions,
    reads_answers,
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


def test_only_classification_compares_candidates_in_training():
    assert training_objective("classification").loss is classification_loss
    assert training_objective("multiple_choice").loss is teacher_forcing_loss
    assert training_objective("generation").loss is teacher_forcing_loss


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


@reads_answers
def num_characters(answers, batch):
    return torch.tensor([float(len(answer)) for answer in answers])


def whole_numbers(logits, batch):
    return torch.ones(len(batch.examples), dtype=torch.int64)


def one_number(logits, batch):
    return torch.tensor(0.5)


def plain_list(logits, batch):
    return [0.5] * len(batch.examples)


@reward
def as_long_as_asked(answers, records):
    return [len(answer) == record["wanted"] for answer, record in zip(answers, records, strict=True)]


@reward
def text(answers, records):
    return "abc"


@reward
def too_few(answers, records):
    return [1.0]


@reward
def no_number(answers, records):
    return [0.5, float("nan")]


@reward
def absent_field(answers, records):
    return [record["absent"] for record in records]


@reads_answers
def not_finite(answers, batch):
    return torch.tensor([float("inf"), 0.0])


NOT_A_FUNCTION = 3


def test_the_objective_called_task_is_the_tasks_own():
    for task in (TASKS["sst2"], TASKS["copa"], TASKS["squad"]):
        assert load_objective("task", task) == training_objective(task.kind)


def test_a_function_of_ones_own_is_found_by_its_name():
    objective = load_objective("test_objectives:halves", TASKS["copa"])
    assert not objective.reads_answers
    examples = ragged_examples()
    batch = objective.build_batch(examples, PAD)
    assert batch.weight == len(examples)
    own = teacher_forcing_batch(examples, PAD)
    assert torch.equal(batch.labels["target_ids"], own.labels["target_ids"])
    shown = replace(batch, examples=(Example("", (), None, 0),) * 2)
    assert objective.loss(torch.zeros(3), shown).tolist() == [0.5, 0.5]


def test_objectives_of_answers_say_so():
    assert load_objective("f1", TASKS["squad"]).reads_answers
    objective = load_objective("test_objectives:num_characters", TASKS["sst2"])
    assert objective.reads_answers
    batch = MicroBatch({}, 2, examples=(Example("", (), None, 0),) * 2)
    assert objective.loss(["abc", ""], batch).tolist() == [3.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("F1", "expected: task, f1 or package.module:function; fix: correct the name"),
        ("halves", "train.objective=halves does not name an objective; got: ValueError: invalid format"),
        ("test_objectives:", "got: TypeError: .* is not a function"),
        (":halves", "got: ValueError: invalid format"),
        ("test_objectives:halves:x", "got: ValueError: invalid format"),
        ("no_such_package.module:f", "got: ModuleNotFoundError: No module named 'no_such.*PYTHONPATH"),
        ("test_objectives:no_such", "got: AttributeError: .*no_such"),
        ("test_objectives:NOT_A_FUNCTION", "got: TypeError: 3 is not a function"),
        (
            "f1",
            "train.objective=f1 does not fit task copa; got: a task scored by accuracy; expected: .* squad",
        ),
    ],
)
def test_an_objective_that_cannot_be_had_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        load_objective(name, TASKS["copa"])


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("whole_numbers", r"torch.int64 \(2,\)"),
        ("one_number", r"torch.float32 \(\)"),
        ("plain_list", r"\[0.5, 0.5\]"),
    ],
)
def test_an_objective_that_gives_no_loss_of_each_example_is_refused(name, got):
    objective = load_objective(f"test_objectives:{name}", TASKS["copa"])
    batch = MicroBatch({}, 2, examples=(Example("", (), None, 0),) * 2)
    with pytest.raises(
        UserError, match=rf"did not return one loss per example; got: {got}; .* float tensor of shape \(2,\)"
    ):
        objective.loss(torch.zeros(2), batch)


def answered(*records):
    return MicroBatch({}, len(records), examples=tuple(Example("", (), None, 0, record=r) for r in records))


def test_a_reward_reads_the_records_and_is_maximized():
    objective = load_objective("test_objectives:as_long_as_asked", TASKS["sst2"])
    assert objective.reads_answers
    assert objective.is_reward
    batch = answered({"wanted": 3}, {"wanted": 3})
    assert objective.loss(["abc", ""], batch).tolist() == [-1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text", "did not return one reward per answer; got: str: abc; expected: a list of 2 numbers"),
        ("too_few", r"did not return one reward per answer; got: list: \[1.0\]; .* 2 numbers"),
        ("no_number", "gave a reward that is not a finite number; got: nan for the answer 'b'"),
        ("absent_field", r"failed; got: KeyError: 'absent' \(.*test_objectives.py line \d+\)"),
        ("not_finite", "gave a loss that is not a finite number; got: inf for the answer 'a'"),
    ],
)
def test_a_function_of_answers_that_fails_is_named(name, message):
    objective = load_objective(f"test_objectives:{name}", TASKS["sst2"])
    with pytest.raises(UserError, match=f"train.objective=test_objectives:{name} {message}"):
        objective.loss(["a", "b"], answered({}, {}))


def test_the_worked_example_of_the_documentation_runs(tmp_path, monkeypatch):
    code = objectives.__doc__.split(":brevity:\n\n")[1]
    (tmp_path / "my_objectives.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    mistakes = load_objective("my_objectives:mistakes", TASKS["sst2"])
    examples = (Example("", (), 0, 0, ("a b",)), Example("", (), 1, 1, ("a", "b c d")))
    batch = MicroBatch({}, 2, labels={"label": torch.tensor([0, 1])}, examples=examples)
    assert mistakes.loss(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), batch).tolist() == [1.0, 0.0]
    wordiness = load_objective("my_objectives:wordiness", TASKS["squad"])
    assert wordiness.reads_answers
    assert wordiness.loss(["a b c", ""], batch).tolist() == [1.0, -1.0]
    brevity = load_objective("my_objectives:brevity", TASKS["squad"])
    assert brevity.loss(["a b", "a b c"], answered(*[{"most_words": 2}] * 2)).tolist() == [-1.0, 0.0]
