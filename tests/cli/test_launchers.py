"""launch/train.py under DeepSpeed's launcher, interrupted, and then under MPI."""

from __future__ import annotations

import psutil
import pytest
from commands import (
    assert_all_end,
    assert_one_error,
    deepspeed,
    mpirun,
    ranks_of,
    run,
    run_forked_well,
    run_well,
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
        sockets = [socket for rank in ranks for socket in rank.net_connections("inet")]
        listening = {s.laddr.ip.removeprefix("::ffff:") for s in sockets if s.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        children = psutil.Process(process.pid).children(recursive=True)
        for launcher in (*(child for child in children if "RANK" not in child.environ()), process):
            launcher.kill()
        assert_all_end(ranks)
    assert results_of(run_dir)["steps"] == num_steps(run_dir) < 60
    run_well(mpirun(2, *arguments("run")))
    run_forked_well(arguments("undisturbed"))
    assert end(run_dir) == end(tmp_path / "undisturbed")


def test_a_launcher_passes_on_one_line_and_the_exit_code(recipe, tmp_path):
    command = mpirun(2, "--config", recipe, f"run_dir={tmp_path / 'run'}", "train.micro_batch_size=8")
    assert_one_error(run(command), 2, "train.micro_batch_size")
    assert not (tmp_path / "run").exists()
