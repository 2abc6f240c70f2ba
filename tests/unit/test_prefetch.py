"""Batches that a thread lays out ahead are those that are laid out on demand."""

from __future__ import annotations

import threading

import pytest
import torch

from lezo_ds.data.prefetch import StepBatches
from lezo_ds.forward.batch import MicroBatch, StepBatch

NUM_MICRO_BATCHES = 4


class Source:
    """Data whose batches say their step and index, and note the thread that lays them out."""

    def __init__(self, fails_at=None):
        self.threads = {}
        self.laid_out = threading.Semaphore(0)
        self._fails_at = fails_at

    def step_batch(self, config, step):
        if step == self._fails_at:
            raise ValueError(f"step {step}")

        def build(index):
            self.threads[step, index] = threading.current_thread()
            self.laid_out.release()
            return MicroBatch({"input_ids": torch.tensor([[step, index]])}, weight=index)

        return StepBatch(
            range(NUM_MICRO_BATCHES), build, bytes([step]), num_examples=NUM_MICRO_BATCHES
        )


def read(batch, indices):
    return [batch[index].inputs["input_ids"].tolist() for index in indices]


def test_the_next_step_is_laid_out_while_this_one_runs():
    source = Source()
    batches = StepBatches(source, config=None)
    for step in range(2):
        assert read(batches.at(step), (1, 3)) == [[[step, 1]], [[step, 3]]]
    for _ in range(4):
        source.laid_out.acquire()
    batch = batches.at(2)
    assert (list(batch.weights), batch.content) == ([0, 1, 2, 3], b"\2")
    for step in (2, 3):  # step 3 begins while 2 is the current step
        for index in (1, 3):
            assert source.laid_out.acquire(timeout=60)
            assert source.threads[step, index] is not threading.main_thread()
    assert read(batch, (1, 2)) == [[[2, 1]], [[2, 2]]]
    assert source.threads[2, 2] is threading.main_thread()


def test_a_resumed_or_repeated_step_has_its_own_batch():
    batches = StepBatches(Source(), config=None)
    for step in (7, 8, 8, 9, 3, 4):
        assert read(batches.at(step), range(4)) == [[[step, index]] for index in range(4)]


def test_an_error_of_the_thread_is_raised_at_its_step():
    batches = StepBatches(Source(fails_at=2), config=None)
    for step in range(2):
        read(batches.at(step), (0,))
    with pytest.raises(ValueError, match="step 2"):
        batches.at(2)


def test_the_thread_ends_with_the_batches():
    before = set(threading.enumerate())
    batches = StepBatches(Source(), config=None)
    batches.at(0)
    (thread,) = set(threading.enumerate()) - before
    del batches
    thread.join(timeout=60)
    assert not thread.is_alive()
