"""Runs that are asked to stop or that lose a rank."""

import os
import re
import signal
import sys

import pytest
from commands import (
    PATIENCE_SECONDS,
    assert_one_error,
    run,
    run_forked,
    run_words,
    train,
    wait_until,
)
from run_ends import STEP, end, num_steps, reaches, results_of
from thorough import thorough

STEPS = 40
LENGTH = [
    *(f"train.steps={STEPS}", f"train.eval_every={STEPS}"),
    *("train.snapshot_every=0", "train.timeout_seconds=8"),
    *("train.batch_size=2", "train.micro_batch_size=1"),  # one pass of each of two ranks
]


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    """The end of a run on one rank to which nothing happens."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    train(recipe, run_dir, *LENGTH)
    return end(run_dir)


def after_four_steps(run_dir, action):
    def meanwhile(ranks):
        wait_until(lambda: reaches(run_dir, STEP, 4), ranks[0])
        action(ranks)

    return meanwhile


@pytest.mark.parametrize(
    ("num_ranks", "rank", "stop"),
    [
        (2, 1, "SIGTERM"),
        (2, None, "a file"),
        thorough(2, 0, "SIGUSR1"),
        thorough(1, 0, "SIGINT"),
        thorough(2, None, "a file that is there before the first evaluation"),
    ],
)
def test_a_signal_or_a_file_stops_all(num_ranks, rank, stop, recipe, undisturbed, tmp_path):
    is_early = "before" in stop

    def ask_to_stop(ranks):
        if rank is None:
            (tmp_path / "STOP").touch()
        else:
            os.kill(ranks[rank].pid, signal.Signals[stop])

    meanwhile = ask_to_stop if is_early else after_four_steps(tmp_path, ask_to_stop)
    train(recipe, tmp_path, *LENGTH, num_ranks=num_ranks, meanwhile=meanwhile)
    assert not (tmp_path / "STOP").exists()
    results = results_of(tmp_path)
    assert not results["finished"]
    assert results["steps"] == num_steps(tmp_path) < STEPS
    assert results["test"] is None
    if is_early:  # the first evaluation, too, has not gone on to its end
        assert (tmp_path / "journal.jsonl").read_text().count("\n") == 1
    train(recipe, tmp_path, *LENGTH)
    assert end(tmp_path) == undisturbed


@pytest.mark.parametrize(("victim", "number"), [thorough(0, "SIGSTOP"), (1, "SIGKILL")])
def test_a_lost_rank_ends_the_run(victim, number, recipe, undisturbed, tmp_path):
    def lose(ranks):
        os.kill(ranks[victim].pid, signal.Signals[number])
        ranks[1 - victim].join(PATIENCE_SECONDS)
        ranks[victim].kill()

    meanwhile = after_four_steps(tmp_path, lose)
    words = run_words(recipe, tmp_path, *LENGTH)
    finished = run_forked(words, num_ranks=2, meanwhile=meanwhile, grace=60)
    named = re.findall(r"error: another rank has ended.*?last good step: (\d+);", finished.err)
    assert len(named) == 1, finished.err[-5000:]
    # Rank 0 may have journaled the step in flight before rank 1 finished it.
    assert num_steps(tmp_path) - int(named[0]) in (1, 2)
    train(recipe, tmp_path, *LENGTH)
    assert end(tmp_path) == undisturbed


ALLOCATES = """
import torch
from lezo_ds import distributed
from lezo_ds.cli import end_process_after
end_process_after(lambda: torch.empty(1 << 60, dtype=torch.uint8))
"""


def test_too_little_memory_of_a_cpu_is_one_line():
    finished = run([sys.executable, "-c", ALLOCATES])
    assert_one_error(finished, 1, "there is too little memory", "halve train.eval_batch_size")
