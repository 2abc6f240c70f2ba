"""A run lays out the batches of its steps in a thread."""

from __future__ import annotations

import threading

import pytest
from ranks import run_ranks
from tiny_tasks import task_config, write_tasks, write_writer

from lezo_ds.data.reader import Reader
from lezo_ds.runs.trainer import train


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
