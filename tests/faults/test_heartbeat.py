"""Ranks that hang while the others wait without end, as NCCL's do: found by the heartbeat, and only they."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from commands import (
    PATIENCE_SECONDS,
    assert_all_end,
    deepspeed,
    mpirun,
    ranks_of,
    run_forked_well,
    start,
    wait_until,
)
from ranks import run_ranks
from run_ends import STEP, num_steps, reaches

from lezo_ds import distributed
from lezo_ds.distributed import heartbeat
from lezo_ds.errors import LostRankError

TRAIN = str(Path(__file__).parents[1] / "helpers" / "quick_heartbeat_train.py")
LENGTH = [
    # A stopped process closes no socket, and torch's timeout is the default half an hour.
    *("train.steps=60", "train.eval_every=30", "train.snapshot_every=0"),
    *("train.batch_size=2", "train.micro_batch_size=1"),
]


@pytest.mark.parametrize(
    ("starter", "victim"),
    [(mpirun, 0), (mpirun, 1), pytest.param(deepspeed, 1, marks=pytest.mark.long)],
    ids=["rank_0", "rank_1", "deepspeed"],
)
def test_a_hung_rank_ends_the_run_long_before_the_timeout_of_a_message(starter, victim, recipe, tmp_path):
    given = ["--config", recipe, f"run_dir={tmp_path}", *LENGTH]
    with start(starter(2, *given, program=TRAIN)) as process:
        wait_until(lambda: reaches(tmp_path, STEP, 4), process)
        ranks = ranks_of(process)
        ranks[victim].send_signal(signal.SIGSTOP)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert_all_end(ranks)
    assert process.returncode == LostRankError.exit_code
    named = re.findall(r"error: another rank has ended.*?got: (.*?); last good step: (\d+);", err)
    assert len(named) == 1, err[-5000:]
    assert named[0][0] == f"rank {victim} has shown no sign of life for 6 s"
    assert int(named[0][1]) in (num_steps(tmp_path) - 1, num_steps(tmp_path) - 2)
    run_forked_well(given)
    assert num_steps(tmp_path) == 60


def _be_slow(seconds):
    """Be busy for longer than the limit on one rank: once in Python, and once in a call that just waits."""
    heartbeat.LIMIT_SECONDS = 4.0
    distributed.init_distributed()
    with distributed.lost_ranks_reported(lambda: "last good step: none"):
        if distributed.rank() == 1:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                sum(range(100_000))
        distributed.barrier()
        if distributed.rank() == 0:
            time.sleep(seconds)
        return distributed.sum_integers([1])


def test_a_rank_that_takes_longer_than_the_limit_for_a_step_is_not_lost():
    assert run_ranks(_be_slow, 3, 9.0) == [[3]] * 3


def _stop_after_the_work(seconds):
    heartbeat.LIMIT_SECONDS = 2.0
    distributed.init_distributed()
    with distributed.lost_ranks_reported(lambda: "last good step: none"):
        distributed.barrier()
    if distributed.rank() == 1:
        for beating in distributed.start._heartbeats:
            beating.stop()
    time.sleep(seconds)
    return True


def test_a_rank_that_is_through_with_its_work_is_not_missed():
    assert run_ranks(_stop_after_the_work, 2, 6.0) == [True, True]


def test_the_line_and_the_exit_code_are_those_of_a_closed_connection():
    with pytest.raises(LostRankError) as broken, distributed.lost_ranks_reported(lambda: "last good step: 7"):
        raise RuntimeError("Connection closed by peer")
    missed = heartbeat.lost_rank_error("Connection closed by peer", "last good step: 7")
    assert (str(missed), missed.exit_code) == (str(broken.value), broken.value.exit_code)
