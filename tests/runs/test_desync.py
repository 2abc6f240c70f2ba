"""Faults that would silently train another model on one rank are found, named, and done again."""

import math
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from tiny_runs import attach_new_journal, make_batch, start_engine, train

from lezo_ds.data.objectives import classification_loss
from lezo_ds.errors import DesyncError
from lezo_ds.journal import read_journal
from lezo_ds.zo.step import Step

pytestmark = pytest.mark.distributed

FAULTY_STEP = 3
FC1 = "model.decoder.layers.{}.fc1.weight"


def error_of(action):
    try:
        action()
    except DesyncError as error:
        return str(error)


def watched_engine(directory, journal=None, **changes):
    engine = start_engine(directory, **changes)
    if journal is not None:
        attach_new_journal(engine, journal)
    engine.watch_weights()
    return engine


def flip(engine, name, low, index):
    """Flip a bit of a stored element of a parameter, or of its low bits."""
    shards = {shard.name: shard.parameter.ds_tensor for shard in engine.weights.shards}
    stored = (engine.weights.low_bits if low else shards)[name]
    stored.view({2: torch.int16, 4: torch.int32}[stored.element_size()])[index] ^= 8


def _another_gradient(engine):
    own = Step.mean_losses

    def mean_losses(*arguments):
        ((first, *others),) = own(*arguments)
        return [[math.nextafter(first, 9), *others]]

    with mock.patch.object(Step, "mean_losses", mean_losses):
        train(engine, 1)


def _another_seed(engine):
    engine.seed += 1
    train(engine, 1)


def _another_batch(engine):
    batch = make_batch(engine.global_steps)
    batch[-1].inputs["input_ids"][0, 0] += 1
    engine.train_batch(batch, classification_loss)


RESULT = "result of the step before"
FAULTS = {RESULT: _another_gradient, "seed": _another_seed, "batch": _another_batch}


def _train_with_a_fault(directory, journal, fault, faulty_rank, num_ranks):
    engine = watched_engine(directory, journal, num_ranks=num_ranks)
    train(engine, FAULTY_STEP)

    def go_on():
        if engine.global_rank == faulty_rank:
            FAULTS[fault](engine)
        train(engine, 5)

    return error_of(go_on)


@pytest.mark.parametrize(
    ("fault", "rank", "num_ranks"), [*((f, 1, 2) for f in FAULTS), (RESULT, 0, 4)]
)
def test_what_differs_is_named(opt_directory, tmp_path, fault, rank, num_ranks):
    journal = tmp_path / "journal.jsonl"
    settings = (opt_directory, journal, fault, rank, num_ranks)
    (message,) = set(run_ranks(_train_with_a_fault, num_ranks, *settings))
    assert f"step {FAULTY_STEP + (fault == RESULT)}" in message
    if num_ranks == 2:  # nobody can say which of two is wrong
        assert f": the ranks differ in {fault}: rank 0 has " in message
        assert "has another" not in message
    else:
        assert f"rank {rank} has another {fault}" in message
    assert f"last good step: {FAULTY_STEP - 1}" in message
    assert [record.step for record in read_journal(journal)[1]] == list(range(FAULTY_STEP))


def _differ_in_the_last_step(directory):
    engine = watched_engine(directory, num_ranks=2)
    _another_gradient(engine) if engine.global_rank == 1 else train(engine, 1)
    return error_of(engine.check_weights)


def test_the_last_steps_result_is_compared_before_its_weights_are_used(opt_directory):
    for message in run_ranks(_differ_in_the_last_step, 2, opt_directory):
        assert f"the ranks differ in {RESULT}: rank 0 has " in message


def _flip_and_go_on(directory, journal, dtype, num_ranks, low, dropped):
    engine = watched_engine(directory, journal, dtype=dtype, num_ranks=num_ranks)
    train(engine, FAULTY_STEP)
    engine.check_weights()
    left_out = set(engine._decide().dropped_layers)
    name = FC1.format(min(left_out if dropped else set(range(4)) - left_out))
    if engine.global_rank == num_ranks - 1:
        flip(engine, name, low, 5)
    train(engine, 1)
    return name, error_of(engine.check_weights)


@pytest.mark.parametrize(
    ("dtype", "num_ranks", "low", "dropped"), [("fp32", 1, False, True), ("bf16", 2, True, False)]
)
def test_a_flipped_bit_is_named(opt_directory, tmp_path, dtype, num_ranks, low, dropped):
    settings = (opt_directory, tmp_path / "journal.jsonl", dtype, num_ranks, low, dropped)
    ((name, message),) = set(run_ranks(_flip_and_go_on, num_ranks, *settings))
    assert f"on rank {num_ranks - 1} {name} is not what a replay of the journal gives" in message
    assert f"last good step: {FAULTY_STEP - 1}" in message


def _flip_in_a_replica(directory, dtype, low):
    engine = watched_engine(directory, dtype=dtype, num_ranks=2, partition_size=1)
    train(engine, 2)
    name = FC1.format(2)
    if engine.global_rank == 1:
        flip(engine, name, low, -1)  # outside of the sample
    return name, error_of(engine.check_weights)


@pytest.mark.parametrize(("dtype", "low"), [("fp32", False), ("bf16", True)])
def test_any_flipped_bit_is_found_by_comparison_with_the_replica(opt_directory, dtype, low):
    for name, message in run_ranks(_flip_in_a_replica, 2, opt_directory, dtype, low):
        assert f"on rank 1 {name} differs from its replica's" in message
