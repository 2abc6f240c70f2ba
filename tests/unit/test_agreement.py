from __future__ import annotations

import pytest
import torch

from lezo_ds.engine.agreement import (
    all_agree,
    batch_digest,
    disagreement,
    fact_numbers,
    wrong_weights,
)
from lezo_ds.engine.step_plan import NUM_FACT_NUMBERS
from lezo_ds.model.batch import MicroBatch

FACTS = {"plan": "a", "batch": "b"}


def batch_of(*ids, weight=1.0, label=0):
    return [MicroBatch({"input_ids": torch.tensor([ids])}, weight, {"label": torch.tensor(label)})]


def test_a_hash_of_facts_is_whole_and_changes_with_any_of_them():
    others = [FACTS, FACTS | {"plan": "b"}, FACTS | {"batch": "a"}, {"plan": "a;batch:b"}]
    numbers = [tuple(fact_numbers(facts)) for facts in others]
    assert len(set(numbers)) == 4
    assert all(len(found) == NUM_FACT_NUMBERS for found in numbers)
    assert all(number.is_integer() and 0 <= number < 2**40 for found in numbers for number in found)


def sums_of(by_rank):
    """Return what an all-reduce in float64 gives, in an order of its own."""
    return torch.tensor([fact_numbers(facts) for facts in by_rank], dtype=torch.float64).sum(dim=0).tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 64, 1000, 8192])
def test_sums_over_the_ranks_tell_whether_all_state_the_same(num_ranks):
    rank, other = num_ranks // 2, {"plan": str(num_ranks), "batch": "b"}
    same = [FACTS] * num_ranks
    assert all_agree(sums_of(same), num_ranks)
    if num_ranks > 1:
        assert not all_agree(sums_of([*same[:rank], other, *same[rank + 1 :]]), num_ranks)
        assert not all_agree(sums_of([*same[:rank], *[other] * (num_ranks - rank)]), num_ranks)
        assert not all_agree(sums_of([{"rank": str(index)} for index in range(num_ranks)]), num_ranks)


def test_the_largest_numbers_are_exact_on_8192_ranks():
    largest = float(2**20 - 1)
    numbers = torch.tensor([[largest, largest**2]], dtype=torch.float64).expand(8192, 2).clone()
    assert all_agree(numbers.sum(dim=0).tolist(), 8192)
    numbers[4711] = torch.tensor([largest - 1, (largest - 1) ** 2])
    assert not all_agree(numbers.sum(dim=0).tolist(), 8192)


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
    assert "at step 7; got: rank 0 has another batch: x, but most ranks have b;" in text
    assert "last good step: 6" in text


def test_of_two_ranks_the_one_that_is_not_the_first_is_named():
    text = str(disagreement(0, [FACTS, FACTS | {"plan": "x"}], 0))
    assert "got: rank 1 has another plan: x, but most ranks have a;" in text
    assert "last good step: none" in text


def test_many_wrong_weights_are_counted():
    error = wrong_weights(5, [f"on rank {rank} w changed" for rank in range(6)], 3)
    assert error.exit_code == 5
    assert "5 steps" in str(error)
    assert "on rank 3 w changed; and 2 more; last good step: 2" in str(error)
