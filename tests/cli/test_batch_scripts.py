"""What the batch scripts ask of Slurm, played by programs that only note what they are told."""

import subprocess

import pytest
from assets import REPOSITORY
from commands import environment

REQUEUE = "scontrol requeue 41"


@pytest.fixture
def submit(tmp_path):
    """Return a function that runs a batch script whose ranks end with an exit code."""
    (tmp_path / "launch").symlink_to(REPOSITORY / "launch")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol", "squeue", "scancel"):
        code = "$CODE" if name == "srun" else "0"
        program = programs / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> "$NOTES"\nexit {code}\n')
        program.chmod(0o755)

    def submit(code, **variables):
        notes = tmp_path / "notes"
        notes.write_text("")
        ids = {"JOB_ID": "41", "ARRAY_JOB_ID": "40", "ARRAY_TASK_ID": "1", "CPUS_PER_TASK": "1"}
        variables |= {f"SLURM_{name}": value for name, value in ids.items()}
        shared = environment(CODE=str(code), NOTES=str(notes), **variables)
        shared["LIGHTHOUSE"] = "http://head:29510"
        shared["PATH"] = f"{programs}:{shared['PATH']}"
        command = ["bash", "launch/slurm/elastic.sbatch", "--config", "recipe.yaml"]
        done = subprocess.run(command, cwd=tmp_path, env=shared, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return notes.read_text().splitlines(), done.stderr

    return submit


def fail(submit, code, **variables):
    """Run a replica that fails, and return whether it goes back into the queue."""
    notes, error = submit(code, **variables)
    assert notes[0].endswith("--config recipe.yaml elastic.lighthouse=http://head:29510")
    assert (REQUEUE in notes) != ("failed four times in a row" in error)
    return REQUEUE in notes


@pytest.mark.parametrize("code", [5, 6])
def test_a_replica_that_always_fails_is_requeued_three_times(submit, tmp_path, code):
    assert [fail(submit, code) for _ in range(4)] == [True, True, True, False]
    lines = (tmp_path / "failures-40-1").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == [f"exit code {code}"] * 4


def test_a_replica_that_has_run_for_an_hour_or_to_its_end_starts_a_new_row(submit, tmp_path):
    hour_ago = tmp_path / "hour_ago"
    hour_ago.write_text("SECONDS=3600\n")
    assert all(fail(submit, 6) for _ in range(3))
    assert fail(submit, 6, BASH_ENV=str(hour_ago))
    assert [fail(submit, 5) for _ in range(3)] == [True, True, False]
    submit(0)
    assert fail(submit, 5)


@pytest.mark.parametrize("code", [1, 2, 3, 4])
def test_what_a_restart_cannot_cure_is_not_requeued(submit, code):
    notes, _ = submit(code)
    assert REQUEUE not in notes
