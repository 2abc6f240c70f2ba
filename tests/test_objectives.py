from __future__ import annotations

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from lezo_ds.batching import candidate_batch, teacher_forcing_batch
from lezo_ds.encoding import EncodedExample
from lezo_ds.objectives import (
    candidate_scores,
    classification_loss,
    predictions,
    teacher_forcing_loss,
    training_objective,
)

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


def brute_token_log_probabilities(model, ids, option_length):
    """Run one sequence alone and in full; log-probability of each of its last tokens."""
    log_probabilities = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return torch.stack(
        [log_probabilities[place - 1, ids[place]] for place in range(len(ids) - option_length, len(ids))]
    )


def brute_scores(model, example):
    pairs = zip(example.sequences, example.option_lengths, strict=True)
    return torch.stack([brute_token_log_probabilities(model, *pair).mean() for pair in pairs])


def brute_classification_losses(model, examples):
    scores = [brute_scores(model, example) for example in examples]
    return [-score.log_softmax(0)[example.label] for score, example in zip(scores, examples, strict=True)]


def assert_close(actual, expected):
    torch.testing.assert_close(actual.double(), torch.stack(expected), rtol=0, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("deduplicate", [True, False])
def test_the_loss_over_one_token_candidates_is_the_brute_force_one_in_both_layouts(model, deduplicate):
    examples = one_token_examples()
    batch = candidate_batch(examples, PAD, deduplicate=deduplicate)
    assert (batch.selection.vocabulary is not None) == deduplicate
    losses = classification_loss(run(model, batch), batch)
    assert_close(losses, brute_classification_losses(model, examples))


@torch.inference_mode()
def test_the_loss_over_candidates_of_any_length_and_number_is_the_brute_force_one(model):
    examples = ragged_examples()
    batch = candidate_batch(examples, PAD)
    assert_close(classification_loss(run(model, batch), batch), brute_classification_losses(model, examples))


@torch.inference_mode()
def test_scores_are_mean_log_probabilities_and_absent_candidates_score_minus_infinity(model):
    examples = ragged_examples()
    batch = candidate_batch(examples, PAD)
    scores = candidate_scores(run(model, batch), batch)
    assert scores.shape == (5, 4)
    for row, example in zip(scores, examples, strict=True):
        num_candidates = len(example.sequences)
        assert_close(row[:num_candidates], list(brute_scores(model, example)))
        assert row[num_candidates:].eq(float("-inf")).all()


@torch.inference_mode()
def test_one_row_scores_differ_from_full_ones_by_a_constant_of_each_example(model):
    examples = one_token_examples()
    short, full = (candidate_batch(examples, PAD, deduplicate=flag) for flag in (True, False))
    difference = candidate_scores(run(model, short), short) - candidate_scores(run(model, full), full)
    torch.testing.assert_close(difference, difference[:, :1].expand(-1, 3), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_the_teacher_forced_loss_is_the_brute_force_mean_over_all_gold_tokens(model):
    examples = ragged_examples()
    batch = teacher_forcing_batch(examples, PAD)
    golds = [
        brute_token_log_probabilities(model, e.sequences[e.label], e.option_lengths[e.label])
        for e in examples
    ]
    losses = teacher_forcing_loss(run(model, batch), batch)
    assert_close(losses, [-gold.sum() for gold in golds])
    mean = losses.sum() / batch.weight
    assert mean.item() == pytest.approx(-torch.cat(golds).mean().item(), abs=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["classification", "multiple_choice", "generation"])
@pytest.mark.parametrize("make_examples", [one_token_examples, ragged_examples])
def test_a_batch_gives_each_example_the_loss_it_has_alone(model, kind, make_examples):
    examples = make_examples()
    objective = training_objective(kind)
    together = objective.build_batch(examples, PAD)
    alone = [objective.build_batch([example], PAD) for example in examples]
    losses = objective.loss(run(model, together), together)
    assert_close(losses, [objective.loss(run(model, batch), batch)[0].double() for batch in alone])
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
