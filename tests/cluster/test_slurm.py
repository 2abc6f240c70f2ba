"""The batch scripts on a real Slurm of two hosts: every job ends as a run of plain python does."""

import pytest
from assets import REPOSITORY
from hosts import LONG, SHORT, assert_stopped_by_agreement, wait_until
from run_ends import end, num_steps, results_of

pytestmark = [pytest.mark.cluster, pytest.mark.distributed]

SCRIPTS = REPOSITORY / "launch" / "slurm"
RUNNING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")


def submit(slurm, script, recipe, run_dir, length, *options):
    output = f"--output={run_dir}.out"
    return slurm.submit(
        output, *options, SCRIPTS / script, "--config", recipe, f"run_dir={run_dir}", *length
    )


def wait_for_end(slurm, job, run_dir):
    wait_until(lambda: slurm.fact(job, "JobState") not in RUNNING)
    state = (slurm.fact(job, "JobState"), slurm.fact(job, "ExitCode"))
    output = run_dir.with_name(run_dir.name + ".out").read_text()
    assert state == ("COMPLETED", "0:0"), output[-5000:]


def interrupt(slurm, job, *command):
    slurm.run_well(*command, job)
    wait_until(lambda: slurm.fact(job, "Restarts") == "1")


def test_a_job_on_two_nodes_is_the_run_of_plain_python(slurm, recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    job = submit(slurm, "several_nodes.sbatch", recipe, run_dir, SHORT, "--ntasks-per-node=1")
    wait_for_end(slurm, job, run_dir)
    assert slurm.fact(job, "NumNodes") == "2"
    assert results_of(run_dir)["world_size"] == 2
    assert end(run_dir) == undisturbed(SHORT)


def test_a_job_told_to_stop_is_queued_and_resumes(slurm, recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    job = submit(slurm, "one_node.sbatch", recipe, run_dir, LONG)
    wait_until(lambda: num_steps(run_dir) >= 20)
    interrupt(slurm, job, "scancel", "--signal=USR1", "--batch")  # as before the time limit
    assert_stopped_by_agreement(run_dir)
    wait_for_end(slurm, job, run_dir)
    assert results_of(run_dir)["world_size"] == 2
    assert end(run_dir) == undisturbed(LONG)


def test_a_job_that_is_requeued_resumes(slurm, recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    job = submit(slurm, "several_nodes.sbatch", recipe, run_dir, LONG, "--ntasks-per-node=1")
    wait_until(lambda: num_steps(run_dir) >= 50)
    interrupt(slurm, job, "scontrol", "requeue")
    assert num_steps(run_dir) < 200
    wait_for_end(slurm, job, run_dir)
    assert end(run_dir) == undisturbed(LONG)


def test_an_array_of_replicas_loses_one_and_does_one_run(slurm, recipe, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    options = ("--array=0-1", "--export=ALL,LEZO_SECRET=secret")
    length = (*LONG, "train.steps=1000")
    job = submit(slurm, "elastic.sbatch", recipe, run_dir, length, *options)
    second = run_dir / "replicas" / "1"
    wait_until(lambda: num_steps(second) >= 50)
    interrupt(slurm, f"{job}_1", "scontrol", "requeue")
    for task in (0, 1):
        wait_for_end(slurm, f"{job}_{task}", run_dir)
    (REPOSITORY / f"lighthouse-{job}").unlink()
    assert (run_dir / "journal.jsonl").read_bytes() == (second / "journal.jsonl").read_bytes()
    digests = {results_of(path)["weights_digest"] for path in (run_dir, second)}
    assert digests == {undisturbed(length).results["weights_digest"]}
