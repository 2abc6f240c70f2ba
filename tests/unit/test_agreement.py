from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lezo_ds.engine.agreement import (
    all_agree,
    batch_digest,
    batch_facts,
    disagreement,
    fact_numbers,
    share_number,
    watched_rank,
    wrong_weights,
)
from lezo_ds.engine.step_plan import NUM_FACT_NUMBERS

from lezo_ds.forward.batch import LogitSelection, MicroBatch, StepBatch

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


def selecting(position, vocabulary=None):
    """Return a batch of one sequence that needs the logits at one position."""
    selection = LogitSelection(torch.tensor([0]), torch.tensor([position]), vocabulary)
    return [replace(batch_of(1, 2)[0], selection=selection)]


def test_a_digest_of_a_batch_sees_tokens_labels_weights_order_and_the_needed_logits():
    batches = [
        batch_of(1, 2),
        batch_of(2, 1),
        batch_of(1, 2, weight=2.0),
        batch_of(1, 2, label=1),
        batch_of(1) + batch_of(2),
        batch_of(2) + batch_of(1),
        selecting(0),
        selecting(1),
        selecting(1, torch.tensor([3])),
    ]
    assert len({batch_digest(batch) for batch in batches}) == len(batches)
    assert batch_digest(batch_of(1, 2)) == batch_digest(batch_of(1, 2))


def test_a_digest_of_a_batch_takes_any_dtype_and_layout():
    for tensor in (torch.zeros(2, 3, dtype=torch.bfloat16), torch.eye(3).t()[:, 1:], torch.tensor(True)):
        assert len(batch_digest([MicroBatch({"x": tensor}, 1.0)])) == 16


def step_batch(laid_out, changed=None, num_micro_batches=12):
    """Return a step's batch that notes which micro-batches are laid out; one may hold another token."""

    def build(index):
        laid_out.add(index)
        return batch_of(index, index == changed)[0]

    return StepBatch([1.0] * num_micro_batches, build, content=b"rows")


def sum_of_shares(num_ranks, step, rank_with_another=None, changed=None):
    """Return the sum of all ranks' numbers, and what each of them has laid out."""
    numbers, seen = [], []
    for rank in range(num_ranks):
        seen.append(set())
        batch = step_batch(seen[-1], changed if rank == rank_with_another else None)
        mine, watched = (range(r, len(batch), num_ranks) for r in (rank, watched_rank(rank, num_ranks, step)))
        numbers.append(share_number(batch, mine, watched))
    assert all(number.is_integer() and abs(number) < 2**40 for number in numbers)
    return sum(numbers), seen


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 12])
def test_another_token_in_the_share_of_a_rank_is_seen_by_the_one_that_watches_it(num_ranks):
    for step in range(num_ranks):
        total, seen = sum_of_shares(num_ranks, step)
        assert total == 0
        assert all(len(laid_out) == 2 * 12 // num_ranks for laid_out in seen)
        for index in range(12):
            # It is run with the wrong token, or its owner is told that the token is wrong.
            owner = index % num_ranks
            assert sum_of_shares(num_ranks, step, owner, index)[0] != 0


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_each_rank_is_watched_by_one_other_and_by_every_other_in_turn(num_ranks):
    watched = [[watched_rank(rank, num_ranks, step) for rank in range(num_ranks)] for step in range(10)]
    assert all(sorted(ranks) == list(range(num_ranks)) for ranks in watched)
    for rank in range(num_ranks):
        assert {ranks[rank] for ranks in watched} == set(range(num_ranks)) - {rank}


def test_what_a_rank_states_of_a_batch_needs_no_layout():
    laid_out = set()
    batch = step_batch(laid_out)
    assert batch_facts(batch) == batch_facts(step_batch(set()))
    assert batch_facts(batch) != batch_facts(step_batch(set(), num_micro_batches=11))
    assert batch_facts(batch) != batch_facts(StepBatch(batch.weights, batch.__getitem__, b"other rows"))
    assert laid_out == set()


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
