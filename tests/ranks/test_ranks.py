from __future__ import annotations

import os
import sys
import time

import pytest
import torch
from ranks import run_ranks

from lezo_ds import distributed

pytestmark = pytest.mark.distributed


def _join():
    distributed.init_distributed()
    summed = distributed.sum_vector(torch.ones(1, dtype=torch.float64))
    return distributed.rank(), distributed.world_size(), summed, os.getpid()


def _fail_on_rank_one():
    distributed.init_distributed()
    if distributed.rank() == 1:
        raise ValueError("the trouble of rank one")
    distributed.barrier()


def _die_or_sleep():
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(600)


def _has_imported_the_libraries():
    return {"preload", "deepspeed", "datasets", "lezo_ds.runs.trainer"} <= sys.modules.keys()


def test_ranks_begin_with_the_libraries_imported():
    # An import error in the server is silent: each rank would import them for itself.
    assert run_ranks(_has_imported_the_libraries, 1) == [True]


def test_every_rank_is_a_process_of_one_group():
    results = run_ranks(_join, 3)
    assert [result[:3] for result in results] == [(rank, 3, [3.0]) for rank in range(3)]
    assert len({os.getpid(), *(result[3] for result in results)}) == 4


def test_the_traceback_of_a_failing_rank_is_shown():
    with pytest.raises(AssertionError, match=r"rank 1: Traceback[^$]*the trouble of rank one"):
        run_ranks(_fail_on_rank_one, 2)


def test_a_dead_rank_is_named_and_the_others_do_not_hang():
    with pytest.raises(AssertionError, match=r"rank 0: no answer\nrank 1: died without an answer"):
        run_ranks(_die_or_sleep, 2)
