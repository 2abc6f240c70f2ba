"""Runs that are asked to stop, that share a directory, or that lose a rank."""

from __future__ import annotations

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
    run_forked_well,
    wait_until,
)
from run_ends import STEP, end, num_steps, reaches, results_of
from thorough import thorough

STEPS = 40
LENGTH = [
    f"train.steps={STEPS}",
    f"train.eval_every={STEPS}",
    "train.snapshot_every=0",
    "train.timeout_seconds=8",
    "train.batch_size=2",  # one pass of each of two ranks
    "train.micro_batch_size=1",
]


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    """The end of a run on one rank to which nothing happens."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run_forked_well(arguments(recipe, run_dir))
    return end(run_dir)


def arguments(recipe, run_dir):
    return ["--config", recipe, f"run_dir={run_dir}", *LENGTH]


def after_four_steps(run_dir, action):
    def meanwhile(ranks):
        wait_until(lambda: reaches(run_dir, STEP, 4), ranks[0])
        action(ranks)

    return meanwhile


def assert_stopped_well_and_resumes(recipe, run_dir, undisturbed):
    results = results_of(run_dir)
    assert not results["finished"]
    assert results["steps"] == num_steps(run_dir) < STEPS
    assert results["test"] is None
    run_forked_well(arguments(recipe, run_dir))
    assert end(run_dir) == undisturbed


def test_a_file_stops_all_ranks_and_the_run_resumes(recipe, undisturbed, tmp_path):
    stop = after_four_steps(tmp_path, lambda _: (tmp_path / "STOP").touch())
    run_forked_well(arguments(recipe, tmp_path), num_ranks=2, meanwhile=stop)
    assert not (tmp_path / "STOP").exists()
    assert_stopped_well_and_resumes(recipe, tmp_path, undisturbed)


@pytest.mark.thorough
def test_a_stop_asked_for_in_an_evaluation_does_not_wait_for_its_end(recipe, undisturbed, tmp_path):
    # The file is there before the run looks for the first time: in the first evaluation.
    (tmp_path / "STOP").touch()
    run_forked_well(arguments(recipe, tmp_path), num_ranks=2)
    assert (tmp_path / "journal.jsonl").read_text().count("\n") == 1
    assert_stopped_well_and_resumes(recipe, tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("num_ranks", "rank", "number"),
    [(2, 1, "SIGTERM"), thorough(2, 0, "SIGUSR1"), thorough(1, 0, "SIGINT")],
)
def test_a_signal_to_one_rank_stops_all(num_ranks, rank, number, recipe, undisturbed, tmp_path):
    stop = after_four_steps(
        tmp_path, lambda ranks: os.kill(ranks[rank].pid, signal.Signals[number])
    )
    run_forked_well(arguments(recipe, tmp_path), num_ranks=num_ranks, meanwhile=stop)
    assert_stopped_well_and_resumes(recipe, tmp_path, undisturbed)


@pytest.mark.thorough
def test_a_second_process_in_a_directory_is_refused_and_the_first_goes_on(recipe, tmp_path):
    def start_another(ranks):
        second = run_forked(arguments(recipe, tmp_path), num_ranks=2)
        assert_one_error(second, 2, "is in use", f"process {ranks[0].pid} on ")
        assert ranks[0].is_alive()
        (tmp_path / "STOP").touch()

    endless = [*arguments(recipe, tmp_path), "train.steps=1000000"]
    run_forked_well(endless, meanwhile=after_four_steps(tmp_path, start_another))


@pytest.mark.parametrize(("victim", "number"), [thorough(0, "SIGSTOP"), (1, "SIGKILL")])
def test_a_lost_rank_ends_the_run(victim, number, recipe, undisturbed, tmp_path):
    def lose(ranks):
        os.kill(ranks[victim].pid, signal.Signals[number])
        ranks[1 - victim].join(PATIENCE_SECONDS)
        ranks[victim].kill()

    meanwhile = after_four_steps(tmp_path, lose)
    finished = run_forked(arguments(recipe, tmp_path), num_ranks=2, meanwhile=meanwhile, grace=60)
    named = re.findall(r"error: another rank has ended.*?last good step: (\d+);", finished.err)
    assert len(named) == 1, finished.err[-5000:]
    # Rank 0 may have journaled the step in flight before rank 1 finished it.
    assert num_steps(tmp_path) - int(named[0]) in (1, 2)
    run_forked_well(arguments(recipe, tmp_path))
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
