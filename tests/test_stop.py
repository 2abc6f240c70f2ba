"""Runs that are asked to stop, or for a snapshot: by files, and by signals to ranks and to launchers."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil
import pytest
from assets import write_recipe
from commands import deepspeed, mpirun, python, run_well, start
from faults import run_forked
from test_kill_and_resume import PATIENCE_SECONDS, num_steps, rank_of, reaches, wait_until

from lezo_ds.model.snapshots import read_manifest, snapshot_path

pytestmark = pytest.mark.distributed

STEPS = 60
LENGTH = [f"train.steps={STEPS}", "train.eval_every=30", "train.snapshot_every=0"]
STEP = '"kind":"step"'


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run_well(python(*arguments(recipe, run_dir)))
    return results_of(run_dir)["weights_digest"], without_header(run_dir)


def arguments(recipe, run_dir):
    return ["--config", recipe, f"run_dir={run_dir}", *LENGTH]


def results_of(run_dir):
    return json.loads((run_dir / "results.json").read_text())


def without_header(run_dir):
    """Return the journal's lines without their checksums, which depend on the header."""
    lines = (run_dir / "journal.jsonl").read_text().splitlines()[1:]
    return [line.rpartition(',"crc":')[0] for line in lines]


def assert_stopped_well(run_dir):
    results = results_of(run_dir)
    assert not results["finished"]
    assert results["steps"] == num_steps(run_dir) < STEPS
    assert results["test"] is None


def assert_resumes(recipe, run_dir, undisturbed):
    run_well(python(*arguments(recipe, run_dir)))
    assert (results_of(run_dir)["weights_digest"], without_header(run_dir)) == undisturbed


def wait_for_end(process):
    """Return the command's errors and the seconds it took to end."""
    began = time.monotonic()
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    return err, time.monotonic() - began


def wait_for_ranks(ranks):
    psutil.wait_procs(ranks, timeout=PATIENCE_SECONDS)
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def test_a_file_stops_all_ranks_after_the_step_in_flight_and_the_run_resumes(recipe, undisturbed, tmp_path):
    with start(deepspeed(2, *arguments(recipe, tmp_path))) as process:
        wait_until(lambda: reaches(tmp_path, STEP, 4), process)
        (tmp_path / "STOP").touch()
        before = num_steps(tmp_path)
        err, seconds = wait_for_end(process)
    assert process.returncode == 0, err[-5000:]
    print(f"\nstopped {num_steps(tmp_path) - before} steps and {seconds:.1f} s after the file was made")
    assert_stopped_well(tmp_path)
    assert not (tmp_path / "STOP").exists()
    assert_resumes(recipe, tmp_path, undisturbed)


def test_a_file_asks_for_a_snapshot_and_the_run_goes_on(recipe, undisturbed, tmp_path):
    with start(deepspeed(2, *arguments(recipe, tmp_path))) as process:
        wait_until(lambda: reaches(tmp_path, STEP, 4), process)
        (tmp_path / "SAVE").touch()
        wait_until(lambda: not (tmp_path / "SAVE").exists(), process)
        (snapshot,) = (tmp_path / "snapshots").glob("step-*")
        assert 4 <= read_manifest(snapshot)["step"] < STEPS
        err, _ = wait_for_end(process)
    assert process.returncode == 0, err[-5000:]
    assert results_of(tmp_path)["finished"]
    assert read_manifest(snapshot_path(tmp_path / "snapshots", STEPS)) is not None
    assert (results_of(tmp_path)["weights_digest"], without_header(tmp_path)) == undisturbed


def test_a_stop_asked_for_in_an_evaluation_does_not_wait_for_its_end(recipe, undisturbed, tmp_path):
    # The file is there before the run looks for the first time: in the first evaluation.
    (tmp_path / "STOP").touch()
    run_well(deepspeed(2, *arguments(recipe, tmp_path)))
    assert_stopped_well(tmp_path)
    assert without_header(tmp_path) == []
    assert_resumes(recipe, tmp_path, undisturbed)


# `make soak` sends each to each.
@pytest.mark.parametrize(
    ("rank", "number"),
    [(0, signal.SIGTERM), (1, signal.SIGUSR1), (0, signal.SIGINT)],
    ids=["SIGTERM", "SIGUSR1", "SIGINT"],
)
def test_each_signal_to_one_rank_stops_both_after_the_same_step(rank, number, recipe, undisturbed, tmp_path):
    ranks = []

    def stop(processes):
        ranks.extend(processes)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reaches(tmp_path / "run", STEP, 4):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(processes[rank].pid, number)

    finished = run_forked(arguments(recipe, tmp_path / "run"), num_ranks=2, meanwhile=stop)
    assert [process.exitcode for process in ranks] == [0, 0], finished.err[-5000:]
    assert_stopped_well(tmp_path / "run")
    assert run_forked(arguments(recipe, tmp_path / "run"), num_ranks=2).code == 0
    assert (results_of(tmp_path / "run")["weights_digest"], without_header(tmp_path / "run")) == undisturbed


def test_a_signal_to_the_deepspeed_command_stops_all_ranks_well(recipe, undisturbed, tmp_path):
    # It ends by it, and passes nothing on.
    with start(deepspeed(2, *arguments(recipe, tmp_path))) as process:
        wait_until(lambda: reaches(tmp_path, STEP, 4), process)
        ranks = [rank_of(process, rank) for rank in (0, 1)]
        process.send_signal(signal.SIGUSR1)
        wait_for_ranks(ranks)
        assert process.wait() == -signal.SIGUSR1
    assert_stopped_well(tmp_path)
    assert_resumes(recipe, tmp_path, undisturbed)


def test_sigterm_to_deepspeeds_launcher_stops_all_ranks_well(recipe, undisturbed, tmp_path):
    with start(deepspeed(2, *arguments(recipe, tmp_path))) as process:
        wait_until(lambda: reaches(tmp_path, STEP, 4), process)
        ranks = [rank_of(process, rank) for rank in (0, 1)]
        ranks[0].parent().terminate()  # it passes the signal to one rank, and waits for its end
        wait_for_end(process)
        wait_for_ranks(ranks)
    # The launcher's own code is 1 then, whatever the ranks' are.
    assert_stopped_well(tmp_path)
    assert_resumes(recipe, tmp_path, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_all_processes_of_a_job_stops_all_ranks_well(number, recipe, tmp_path):
    # As a terminal does at Ctrl-C, and Slurm at scancel.
    with start(deepspeed(2, *arguments(recipe, tmp_path))) as process:
        wait_until(lambda: reaches(tmp_path, STEP, 4), process)
        ranks = [rank_of(process, rank) for rank in (0, 1)]
        os.killpg(process.pid, number)
        wait_for_end(process)
        wait_for_ranks(ranks)
    assert_stopped_well(tmp_path)


def test_a_signal_that_mpirun_passes_on_stops_all_ranks_well(recipe, undisturbed, tmp_path):
    with start(mpirun(2, *arguments(recipe, tmp_path))) as process:
        wait_until(lambda: reaches(tmp_path, STEP, 4), process)
        process.send_signal(signal.SIGUSR1)
        err, _ = wait_for_end(process)
    assert process.returncode == 0, err[-5000:]
    assert_stopped_well(tmp_path)
    assert_resumes(recipe, tmp_path, undisturbed)
