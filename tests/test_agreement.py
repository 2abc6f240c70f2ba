from __future__ import annotations

import torch

from lezo_ds.data.batch import MicroBatch
from lezo_ds.engine.agreement import batch_digest, disagreement, fact_number, wrong_weights

FACTS = {"plan": "a", "batch": "b"}


def batch_of(*ids, weight=1.0, label=0):
    return [MicroBatch({"input_ids": torch.tensor([ids])}, weight, {"label": torch.tensor(label)})]


def test_a_hash_of_facts_is_exact_in_float64_and_changes_with_any_of_them():
    others = [FACTS, FACTS | {"plan": "b"}, FACTS | {"batch": "a"}, {"plan": "a;batch:b"}]
    numbers = [fact_number(facts) for facts in others]
    assert len(set(numbers)) == 4
    assert all(number.is_integer() and 0 <= number < 2**53 for number in numbers)


def test_a_digest_of_a_batch_sees_tokens_labels_weights_and_order():
    batches = [
        batch_of(1, 2),
        batch_of(2, 1),
        batch_of(1, 2, weight=2.0),
        batch_of(1, 2, label=1),
        batch_of(1) + batch_of(2),
        batch_of(2) + batch_of(1),
    ]
    assert len({batch_digest(batch) for batch in batches}) == len(batches)
    assert batch_digest(batch_of(1, 2)) == batch_digest(batch_of(1, 2))


def test_a_digest_of_a_batch_takes_any_dtype_and_layout():
    for tensor in (torch.zeros(2, 3, dtype=torch.bfloat16), torch.eye(3).t()[:, 1:], torch.tensor(True)):
        assert len(batch_digest([MicroBatch({"x": tensor}, 1.0)])) == 16


def test_the_rank_that_differs_from_most_is_named_even_if_it_is_the_first():
    text = str(disagreement(7, [FACTS | {"batch": "x"}, FACTS, FACTS], 7))
    assert "at step 7; got: rank 0 has another batch, x, than b;" in text
    assert "last good step: 6" in text


def test_of_two_ranks_the_one_that_is_not_the_first_is_named():
    text = str(disagreement(0, [FACTS, FACTS | {"plan": "x"}], 0))
    assert "got: rank 1 has another plan, x, than a;" in text
    assert "last good step: none" in text


def test_many_wrong_weights_are_counted():
    error = wrong_weights(5, [f"on rank {rank} w changed" for rank in range(6)], 3)
    assert error.exit_code == 5
    assert "5 steps" in str(error)
    assert "on rank 3 w changed; and 2 more; last good step: 2" in str(error)
