"""Runs that are asked to stop, or for a snapshot: by files, and by signals to ranks and to launchers."""

from __future__ import annotations

import os
import signal

import pytest
from commands import (
    PATIENCE_SECONDS,
    assert_all_end,
    deepspeed,
    listening_at,
    mpirun,
    ranks_of,
    run_forked_well,
    start,
    wait_until,
)
from run_ends import STEP, end, num_steps, reaches, results_of

from lezo_ds.model.snapshots import read_manifest, snapshot_path

STEPS = 40
LENGTH = [
    *(f"train.steps={STEPS}", "train.eval_every=20", "train.snapshot_every=0"),
    *("train.batch_size=2", "train.micro_batch_size=1"),  # one pass of each of two ranks
]


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    """The end of a run on one rank to which nothing happens."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run_forked_well(arguments(recipe, run_dir))
    return end(run_dir)


def arguments(recipe, run_dir):
    return ["--config", recipe, f"run_dir={run_dir}", *LENGTH]


def assert_stopped_well(run_dir):
    results = results_of(run_dir)
    assert not results["finished"]
    assert results["steps"] == num_steps(run_dir) < STEPS
    assert results["test"] is None


def assert_resumes(recipe, run_dir, undisturbed):
    run_forked_well(arguments(recipe, run_dir))
    assert end(run_dir) == undisturbed


# Files.


def test_a_file_stops_all_ranks_and_the_run_resumes(recipe, undisturbed, tmp_path):
    def stop(ranks):
        wait_until(lambda: reaches(tmp_path, STEP, 4), ranks[0])
        (tmp_path / "STOP").touch()

    run_forked_well(arguments(recipe, tmp_path), num_ranks=2, meanwhile=stop)
    assert_stopped_well(tmp_path)
    assert not (tmp_path / "STOP").exists()
    assert_resumes(recipe, tmp_path, undisturbed)


def test_a_file_asks_for_a_snapshot_and_the_run_goes_on(recipe, undisturbed, tmp_path):
    def save(ranks):
        wait_until(lambda: reaches(tmp_path, STEP, 4), ranks[0])
        (tmp_path / "SAVE").touch()
        wait_until(lambda: not (tmp_path / "SAVE").exists(), ranks[0])
        (snapshot,) = (tmp_path / "snapshots").glob("step-*")
        assert 4 <= read_manifest(snapshot)["step"] < STEPS

    run_forked_well(arguments(recipe, tmp_path), num_ranks=2, meanwhile=save)
    assert read_manifest(snapshot_path(tmp_path / "snapshots", STEPS)) is not None
    assert end(tmp_path) == undisturbed


def test_a_stop_asked_for_in_an_evaluation_does_not_wait_for_its_end(recipe, undisturbed, tmp_path):
    # The file is there before the run looks for the first time: in the first evaluation.
    (tmp_path / "STOP").touch()
    run_forked_well(arguments(recipe, tmp_path), num_ranks=2)
    assert_stopped_well(tmp_path)
    assert (tmp_path / "journal.jsonl").read_text().count("\n") == 1
    assert_resumes(recipe, tmp_path, undisturbed)


# Signals to ranks; `make soak` sends each to each.


@pytest.mark.parametrize(
    ("num_ranks", "rank", "number"),
    [(2, 0, signal.SIGTERM), (2, 1, signal.SIGUSR1), (1, 0, signal.SIGINT)],
    ids=["SIGTERM", "SIGUSR1", "SIGINT"],
)
def test_each_signal_to_one_rank_stops_all_after_the_same_step(
    num_ranks, rank, number, recipe, undisturbed, tmp_path
):
    def stop(ranks):
        wait_until(lambda: reaches(tmp_path, STEP, 4), ranks[0])
        os.kill(ranks[rank].pid, number)

    run_forked_well(arguments(recipe, tmp_path), num_ranks=num_ranks, meanwhile=stop)
    assert_stopped_well(tmp_path)
    assert_resumes(recipe, tmp_path, undisturbed)


# Signals to launchers.


def to_the_command(process, ranks):
    process.send_signal(signal.SIGUSR1)


def to_deepspeeds_inner_launcher(process, ranks):
    ranks[0].parent().terminate()  # it passes the signal to one rank, and waits for its end


def to_all_processes(process, ranks):
    os.killpg(process.pid, signal.SIGTERM)  # as Slurm does at scancel


def interrupt_to_all_processes(process, ranks):
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does at Ctrl-C


@pytest.mark.parametrize(
    ("starter", "send", "code"),
    [
        # DeepSpeed's command ends by the signal. Its inner launcher ends with 1 whatever the ranks do.
        (deepspeed, to_the_command, -signal.SIGUSR1),
        pytest.param(deepspeed, to_deepspeeds_inner_launcher, None, marks=pytest.mark.long),
        (deepspeed, to_all_processes, None),
        pytest.param(deepspeed, interrupt_to_all_processes, None, marks=pytest.mark.long),
        (mpirun, to_the_command, 0),
    ],
)
def test_a_signal_to_a_launcher_stops_all_ranks_well(starter, send, code, recipe, undisturbed, tmp_path):
    with start(starter(2, *arguments(recipe, tmp_path)), OMPI_MCA_btl="self,sm") as process:
        wait_until(lambda: reaches(tmp_path, STEP, 4), process)
        ranks = ranks_of(process)
        assert len(ranks) == 2
        assert listening_at(ranks) == {"127.0.0.1"}
        send(process, ranks)
        assert_all_end(ranks)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert code in (None, process.returncode), err[-5000:]
    assert_stopped_well(tmp_path)
    assert_resumes(recipe, tmp_path, undisturbed)
