"""Batches that a thread lays out ahead are those that are laid out on demand."""

import threading

import pytest
import torch
from ranks import run_ranks
from tiny_tasks import task_config, write_tasks, write_writer

from lezo_ds.data.prefetch import StepBatches
from lezo_ds.data.reader import Reader
from lezo_ds.forward.batch import MicroBatch, StepBatch
from lezo_ds.runs.trainer import train

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


def train_and_watch(config):
    """Train; return how many micro-batches the main thread laid out for steps, and all did."""
    own = Reader.objective_batch
    by_main = []

    def objective_batch(reader, split, rows):
        if split.longest_prompt == 0 and len(split) == 12:  # the training split
            by_main.append(threading.current_thread() is threading.main_thread())
        return own(reader, split, rows)

    Reader.objective_batch = objective_batch
    train(config)
    return sum(by_main), len(by_main)


@pytest.mark.distributed
def test_a_run_lays_out_all_but_its_first_batches_in_a_thread(tmp_path):
    writer, data = write_writer(tmp_path / "writer"), write_tasks(tmp_path / "data")
    config = task_config(writer, data, "sst2", tmp_path / "run", train__steps=6)
    ((num_by_main, num_laid_out),) = run_ranks(train_and_watch, 1, config)
    num_micro_batches = 2
    # The comparison before the first step lays out a micro-batch, and each of its records alone.
    num_compared = 2
    assert num_by_main == num_compared + 2 * num_micro_batches  # of the first two steps
    assert num_laid_out >= 6 * num_micro_batches
