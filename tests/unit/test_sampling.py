from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lezo_ds.data.sampling import batch_indices


def test_the_first_thousand_batches_never_change():
    batches = [batch_indices(seed=42, step=step, num_examples=1000, batch_size=16) for step in range(1000)]
    digest = hashlib.sha256(json.dumps(batches).encode()).hexdigest()
    assert digest == "c4a61d8b2c7e90e055acdd7b5d0f1dd11ff14673b0f4ae1209b3612d3e4a569d"


@given(seed=st.integers(0, 2**64 - 1), num_examples=st.integers(1, 40), batch_size=st.integers(1, 60))
def test_batches_laid_end_to_end_are_one_permutation_after_another(seed, num_examples, batch_size):
    stream = [index for step in range(8) for index in batch_indices(seed, step, num_examples, batch_size)]
    assert len(stream) == 8 * batch_size
    for start in range(0, len(stream) - num_examples + 1, num_examples):
        assert sorted(stream[start : start + num_examples]) == list(range(num_examples))


def test_a_batch_may_end_one_epoch_and_begin_the_next():
    epochs = [batch_indices(7, epoch, 10, 10) for epoch in range(2)]
    assert batch_indices(7, 1, 10, 8) == epochs[0][8:] + epochs[1][:6]


def test_epochs_and_seeds_differ_in_their_order():
    orders = [tuple(batch_indices(seed, step, 100, 100)) for seed in range(20) for step in range(20)]
    assert len(set(orders)) == 400


def test_a_long_run_reaches_any_step_without_passing_the_others():
    assert len(batch_indices(0, 10**15, 67_349, 16)) == 16


@pytest.mark.parametrize(
    "arguments", [(-1, 0, 10, 2), (2**64, 0, 10, 2), (0, -1, 10, 2), (0, 0, 0, 2), (0, 0, 10, 0)]
)
def test_arguments_out_of_range_are_our_own_bug(arguments):
    with pytest.raises(ValueError, match="batch_indices"):
        batch_indices(*arguments)
