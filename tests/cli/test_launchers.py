"""launch/train.py under DeepSpeed's launcher and under MPI: one run, interrupted under each."""

from __future__ import annotations

import signal

import psutil
import pytest
from commands import (
    PATIENCE_SECONDS,
    assert_all_end,
    assert_one_error,
    deepspeed,
    listening_at,
    mpirun,
    ranks_of,
    run,
    run_forked_well,
    start,
    wait_until,
)
from run_ends import STEP, end, num_steps, reaches, results_of

pytestmark = pytest.mark.distributed

LENGTH = [
    *("train.steps=60", "train.eval_every=20", "train.snapshot_every=0"),
    *("train.batch_size=2", "train.micro_batch_size=1"),  # one pass of each of two ranks
]


def test_a_run_stops_with_its_launcher_goes_on_under_another_and_ends_as_if_never_stopped(recipe, tmp_path):
    def arguments(name):
        return ["--config", recipe, f"run_dir={tmp_path / name}", *LENGTH]

    run_dir = tmp_path / "run"
    with start(deepspeed(2, *arguments("run"))) as process:
        wait_until(lambda: reaches(run_dir, STEP, 4), process)
        ranks = ranks_of(process)
        assert len(ranks) == 2
        assert listening_at(ranks) == {"127.0.0.1"}
        children = psutil.Process(process.pid).children(recursive=True)
        for launcher in (*(child for child in children if "RANK" not in child.environ()), process):
            launcher.kill()
        assert_all_end(ranks)
    num_done = num_steps(run_dir)
    assert results_of(run_dir)["steps"] == num_done < 60

    with start(mpirun(2, *arguments("run")), OMPI_MCA_btl="self,sm") as process:
        wait_until(lambda: reaches(run_dir, STEP, num_done + 4), process)
        ranks = ranks_of(process)
        assert listening_at(ranks) == {"127.0.0.1"}
        process.send_signal(signal.SIGUSR1)
        assert_all_end(ranks)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert num_done + 4 <= results_of(run_dir)["steps"] == num_steps(run_dir) < 60

    run_forked_well(arguments("run"))
    run_forked_well(arguments("undisturbed"))
    assert end(run_dir) == end(tmp_path / "undisturbed")


def test_a_launcher_passes_on_one_line_and_the_exit_code(recipe, tmp_path):
    command = mpirun(2, "--config", recipe, f"run_dir={tmp_path / 'run'}", "train.micro_batch_size=8")
    assert_one_error(run(command), 2, "train.micro_batch_size")
    assert not (tmp_path / "run").exists()
