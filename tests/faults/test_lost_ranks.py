"""Runs that lose a rank, or have one that hangs: they end in time, name the last good step, and resume."""

from __future__ import annotations

import re
import signal

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
from run_ends import STEP, end, num_steps, reaches

from lezo_ds import distributed
from lezo_ds.errors import LostRankError

LENGTH = [
    *("train.steps=40", "train.eval_every=20", "train.snapshot_every=0", "train.timeout_seconds=5"),
    *("train.batch_size=2", "train.micro_batch_size=1"),  # one pass of each of two ranks
]


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run_forked_well(["--config", recipe, f"run_dir={run_dir}", *LENGTH])
    return end(run_dir)


@pytest.mark.parametrize(
    ("starter", "number", "victim"),
    [
        (deepspeed, signal.SIGKILL, 0),
        (mpirun, signal.SIGSTOP, 0),
        pytest.param(deepspeed, signal.SIGSTOP, 1, marks=pytest.mark.long),
        pytest.param(mpirun, signal.SIGKILL, 1, marks=pytest.mark.long),
    ],
    ids=["deepspeed_dead", "mpirun_hung", "deepspeed_hung", "mpirun_dead"],
)
def test_a_dead_or_hung_rank_ends_the_run_which_names_the_last_good_step(
    starter, number, victim, recipe, undisturbed, tmp_path
):
    given = ["--config", recipe, f"run_dir={tmp_path}", *LENGTH]
    with start(starter(2, *given)) as process:
        wait_until(lambda: reaches(tmp_path, STEP, 4), process)
        ranks = ranks_of(process)
        assert len(ranks) == 2
        ranks[victim].send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert_all_end(ranks)
    assert process.returncode != 0
    named = re.findall(r"error: another rank has ended.*?last good step: (\d+);", err)
    if starter is deepspeed or number == signal.SIGSTOP:  # mpirun ends the others of a dead rank itself
        assert len(named) == 1, err[-5000:]
    if named:
        # Rank 0 may have journaled the step in flight before rank 1 finished it.
        assert int(named[0]) in (num_steps(tmp_path) - 1, num_steps(tmp_path) - 2)
    run_forked_well(given)
    assert end(tmp_path) == undisturbed


@pytest.mark.parametrize(
    "text",
    ["[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234", "Timed out waiting"],
)
def test_errors_of_messages_are_told_from_all_others(text):
    with (
        pytest.raises(LostRankError, match=r"not answered in time; got: .*; last good step: 7; fix: "),
        distributed.lost_ranks_reported(lambda: "last good step: 7"),
    ):
        raise RuntimeError(text)
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        distributed.lost_ranks_reported(lambda: "last good step: 7"),
    ):
        raise RuntimeError("out of memory")
