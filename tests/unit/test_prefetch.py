"""Batches that a thread lays out ahead are those that are laid out on demand."""

import threading

import pytest
import torch

from lezo_ds.data.prefetch import StepBatches
from lezo_ds.forward.batch import MicroBatch, StepBatch

NUM_MICRO_BATCHES = 4


class Source:
    """Data whose batches say their step and index, and which fails at step 2."""

    def step_batch(self, config, step):
        if step == 2:
            raise ValueError(f"step {step}")

        def build(index):
            return MicroBatch({"input_ids": torch.tensor([[step, index]])}, weight=index)

        indices = range(NUM_MICRO_BATCHES)
        return StepBatch(indices, build, bytes([step]), num_examples=NUM_MICRO_BATCHES)


def read(batch):
    return [batch[index].inputs["input_ids"].tolist() for index in range(NUM_MICRO_BATCHES)]


def test_a_resumed_or_repeated_step_has_its_own_batch_or_the_error_of_the_thread():
    batches = StepBatches(Source(), config=None)
    for step in (7, 8, 8, 9, 3, 4, 1):
        assert read(batches.at(step)) == [[[step, index]] for index in range(NUM_MICRO_BATCHES)]
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
