from __future__ import annotations

import pytest

from lezo_ds.data.batches import candidate_batch, scoring_batch, teacher_forcing_batch
from lezo_ds.data.encoding import EncodedExample

PAD = 1


def encoded(context, *candidates, label=0):
    """One example by hand: token ids of the context and of each candidate."""
    return EncodedExample(
        sequences=tuple((0, *context, *candidate) for candidate in candidates),
        option_lengths=tuple(map(len, candidates)),
        label=label,
        truncated=False,
    )


def test_one_token_candidates_share_one_row_that_ends_before_them():
    batch = candidate_batch([encoded((5, 6), (8,), (9,)), encoded((7,), (8,), (9,), label=1)], PAD)
    assert batch.inputs["input_ids"].tolist() == [[0, 5, 6, 1, 1, 1, 1, 1], [0, 7, 1, 1, 1, 1, 1, 1]]
    assert batch.selection.rows.tolist() == [0, 1]
    assert batch.selection.positions.tolist() == [2, 1]
    assert batch.selection.vocabulary.tolist() == [8, 9]
    assert {name: tensor.tolist() for name, tensor in batch.labels.items()} == {"label": [0, 1]}
    assert batch.weight == 2


def test_longer_candidates_get_a_row_each_and_logits_for_each_of_their_tokens():
    batch = candidate_batch([encoded((5,), (8, 9, 10), (11,)), encoded((6, 7), (12, 13), label=0)], PAD)
    assert batch.inputs["input_ids"].tolist() == [
        [0, 5, 8, 9, 1, 1, 1, 1],
        [0, 5, 1, 1, 1, 1, 1, 1],
        [0, 6, 7, 12, 1, 1, 1, 1],
    ]
    assert batch.selection.rows.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.selection.positions.tolist() == [1, 2, 3, 1, 2, 3]
    assert batch.selection.vocabulary is None
    assert {name: tensor.tolist() for name, tensor in batch.labels.items()} == {
        "label": [0, 0],
        "candidate_slots": [[0, 1], [2, -1]],
        "target_ids": [8, 9, 10, 11, 12, 13],
        "token_slots": [[0, 1, 2], [3, -1, -1], [4, 5, -1]],
    }
    assert batch.weight == 2


@pytest.mark.parametrize(
    "examples",
    [
        [encoded((5,), (8,), (9,)), encoded((5,), (9,), (8,))],
        [encoded((5,), (8,), (9,)), encoded((5,), (8,))],
        [encoded((5,), (8,), (9, 10))],
        [EncodedExample(((0, 5, 8), (0, 6, 9)), (1, 1), 0, truncated=True)],
    ],
    ids=["another order", "another number", "two tokens", "another context"],
)
def test_candidates_that_are_not_alike_are_not_merged(examples):
    batch = candidate_batch(examples, PAD)
    assert batch.selection.vocabulary is None
    assert len(batch.inputs["input_ids"]) == sum(len(example.sequences) for example in examples)


def test_the_full_layout_can_be_asked_for():
    batch = candidate_batch([encoded((5, 6), (8,), (9,))], PAD, deduplicate=False)
    assert batch.inputs["input_ids"].tolist() == [[0, 5, 6, 1, 1, 1, 1, 1]] * 2
    assert batch.selection.positions.tolist() == [2, 2]
    assert batch.labels["target_ids"].tolist() == [8, 9]


def test_teacher_forcing_runs_the_gold_candidate_alone_and_weighs_its_tokens():
    batch = teacher_forcing_batch([encoded((5,), (8, 9), (11,)), encoded((6,), (12,), (13,), label=1)], PAD)
    assert batch.inputs["input_ids"].tolist() == [[0, 5, 8, 1, 1, 1, 1, 1], [0, 6, 1, 1, 1, 1, 1, 1]]
    assert batch.selection.rows.tolist() == [0, 0, 1]
    assert batch.selection.positions.tolist() == [1, 2, 1]
    assert {name: tensor.tolist() for name, tensor in batch.labels.items()} == {
        "target_ids": [8, 9, 13],
        "token_slots": [[0, 1], [2, -1]],
    }
    assert batch.weight == 3


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 8), (8, 8), (9, 16), (24, 24)])
def test_rows_are_padded_to_a_multiple_of_eight(num_tokens, width):
    batch = candidate_batch([encoded(range(2, num_tokens + 1), (8,), (9,))], PAD)
    assert batch.inputs["input_ids"].shape == (1, width)


def test_unlabelled_examples_can_be_scored_but_not_trained_on():
    examples = [encoded((5,), (8,), (9,)), encoded((6,), (8,), (9,), label=None)]
    assert "label" not in candidate_batch(examples, PAD).labels
    with pytest.raises(ValueError, match="label"):
        teacher_forcing_batch(examples, PAD)


def test_sequences_to_score_share_a_row_where_they_differ_in_the_last_token_only():
    sequences = [(0, 5, 8), (0, 5, 9), (0, 5, 8, 7), (0, 6, 8)]
    batch = scoring_batch(sequences, [1, 2, 2, 1], PAD)
    assert batch.inputs["input_ids"].tolist() == [
        [0, 5, 1, 1, 1, 1, 1, 1],
        [0, 5, 8, 1, 1, 1, 1, 1],
        [0, 6, 1, 1, 1, 1, 1, 1],
    ]
    assert batch.selection.rows.tolist() == [0, 0, 0, 1, 1, 2]
    assert batch.selection.positions.tolist() == [1, 0, 1, 1, 2, 1]
    assert {name: tensor.tolist() for name, tensor in batch.labels.items()} == {
        "target_ids": [8, 5, 9, 8, 7, 8],
        "token_slots": [[0, -1], [1, 2], [3, 4], [5, -1]],
    }
    assert batch.weight == 6
