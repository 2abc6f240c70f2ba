"""The batch scripts on a real Slurm of two hosts: every job ends as the same run of plain python
does."""

from __future__ import annotations

import csv

import pytest
from assets import REPOSITORY
from hosts import LONG, SHORT, assert_stopped_by_agreement, wait_until
from run_ends import end, num_steps, results_of

pytestmark = [pytest.mark.cluster, pytest.mark.distributed]

SCRIPTS = REPOSITORY / "launch" / "slurm"
SWEEP = ("--grid", "zo.learning_rate=1e-3,1e-2", "seed,data.seed=0,1")


def submit(slurm, script, recipe, run_dir, length, *options):
    output = f"--output={run_dir}.out"
    return slurm.submit(
        output, *options, SCRIPTS / script, "--config", recipe, f"run_dir={run_dir}", *length
    )


def wait_for_end(slurm, job, run_dir):
    running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
    wait_until(lambda: slurm.fact(job, "JobState") not in running, f"the end of job {job}")
    output = run_dir.with_name(run_dir.name + ".out").read_text()
    assert (slurm.fact(job, "JobState"), slurm.fact(job, "ExitCode")) == ("COMPLETED", "0:0"), (
        output[-5000:]
    )


def wait_for_steps(run_dir, count):
    wait_until(lambda: num_steps(run_dir) >= count, f"{count} steps")


def wait_for_requeue(slurm, job):
    wait_until(
        lambda: slurm.fact(job, "Restarts") == "1", f"job {job} to be put back into the queue"
    )


def test_a_job_on_two_nodes_is_the_run_of_plain_python(slurm, recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    job = submit(slurm, "several_nodes.sbatch", recipe, run_dir, SHORT, "--ntasks-per-node=1")
    wait_for_end(slurm, job, run_dir)
    assert slurm.fact(job, "NumNodes") == "2"
    assert results_of(run_dir)["world_size"] == 2
    assert end(run_dir) == undisturbed(SHORT)


def test_a_job_told_to_stop_goes_back_into_the_queue_and_resumes(
    slurm, recipe, undisturbed, tmp_path
):
    run_dir = tmp_path / "run"
    job = submit(slurm, "one_node.sbatch", recipe, run_dir, LONG)
    wait_for_steps(run_dir, 20)
    # As Slurm does before the time limit.
    slurm.run_well("scancel", "--signal=USR1", "--batch", job)
    wait_for_requeue(slurm, job)
    assert_stopped_by_agreement(run_dir)
    wait_for_end(slurm, job, run_dir)
    assert results_of(run_dir)["world_size"] == 2
    assert end(run_dir) == undisturbed(LONG)


def test_a_job_that_is_requeued_resumes(slurm, recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    job = submit(slurm, "several_nodes.sbatch", recipe, run_dir, LONG, "--ntasks-per-node=1")
    wait_for_steps(run_dir, 50)
    slurm.run_well("scontrol", "requeue", job)
    wait_for_requeue(slurm, job)
    assert num_steps(run_dir) < 200
    wait_for_end(slurm, job, run_dir)
    assert end(run_dir) == undisturbed(LONG)


def test_an_array_does_the_runs_of_a_sweep(slurm, recipe, tmp_path):
    sweep = ("--config", recipe, "--out", tmp_path / "sweep", *SHORT, *SWEEP)
    options = ("--array=0-3%2", f"--output={tmp_path}/%a.out")
    job = slurm.submit(*options, SCRIPTS / "sweep.sbatch", *sweep)
    left = ("squeue", "--noheader", "--job", job)
    wait_until(lambda: slurm.run_well(*left) == "", "the end of the array")
    printed = slurm.run_well("python", "launch/sweep.py", *sweep, "--list")
    outputs = "".join(path.read_text() for path in tmp_path.glob("?.out"))
    assert printed.count("  done  ") == 4, outputs
    with (tmp_path / "sweep" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert all(results_of(tmp_path / "sweep" / row["run"])["world_size"] == 2 for row in rows)


def test_an_array_of_replicas_loses_one_and_does_one_run(slurm, recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    options = ("--array=0-1", "--export=ALL,LEZO_SECRET=secret")
    length = (*LONG, "train.steps=1000")
    job = submit(slurm, "elastic.sbatch", recipe, run_dir, length, *options)
    second = run_dir / "replicas" / "1"
    wait_for_steps(second, 50)
    slurm.run_well("scontrol", "requeue", f"{job}_1")
    wait_for_requeue(slurm, f"{job}_1")
    for task in (0, 1):
        wait_for_end(slurm, f"{job}_{task}", run_dir)
    (REPOSITORY / f"lighthouse-{job}").unlink()
    assert (run_dir / "journal.jsonl").read_bytes() == (second / "journal.jsonl").read_bytes()
    digests = {results_of(path)["weights_digest"] for path in (run_dir, second)}
    assert digests == {undisturbed(length).results["weights_digest"]}
