"""launch/train.py under DeepSpeed's launcher, which is killed, and then under MPI, where a rank
hangs."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest
from commands import (
    PATIENCE_SECONDS,
    assert_all_end,
    deepspeed,
    mpirun,
    ranks_of,
    run_forked_well,
    start,
    wait_until,
)
from run_ends import STEP, end, num_steps, reaches, results_of

from lezo_ds.errors import LostRankError

pytestmark = pytest.mark.distributed

QUICK = Path(__file__).parents[1] / "helpers" / "quick_heartbeat_train.py"
LENGTH = [
    *("train.steps=60", "train.eval_every=60", "train.snapshot_every=0"),
    *("train.batch_size=2", "train.micro_batch_size=1"),  # one pass of each of two ranks
]


@pytest.mark.thorough
def test_a_run_loses_its_launcher_then_a_rank_and_ends_as_if_never_stopped(recipe, tmp_path):
    def arguments(name):
        return ["--config", recipe, f"run_dir={tmp_path / name}", *LENGTH]

    run_dir = tmp_path / "run"
    with start(deepspeed(2, *arguments("run"))) as process:
        wait_until(lambda: reaches(run_dir, STEP, 4), process)
        ranks = ranks_of(process)
        assert len(ranks) == 2
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
    with start(mpirun(2, *arguments("run"), program=QUICK)) as process:
        wait_until(lambda: reaches(run_dir, STEP, done + 4), process)
        ranks = ranks_of(process)
        # A stopped process closes no socket, and torch's timeout is half an hour.
        ranks[1].send_signal(signal.SIGSTOP)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert_all_end(ranks)
    assert process.returncode == LostRankError.exit_code
    ((what, step),) = re.findall(
        r"error: another rank has ended, .*?: (.*?); last good step: (\d+);", err
    )
    assert what == "rank 1 has shown no sign of life for 6 s"
    assert int(step) in (num_steps(run_dir) - 1, num_steps(run_dir) - 2)
    run_forked_well(arguments("run"))
    run_forked_well(arguments("undisturbed"))
    assert end(run_dir) == end(tmp_path / "undisturbed")


def test_a_command_of_one_rank_does_not_wait_for_the_others(recipe, tmp_path):
    data = recipe.parent / "data" / "train.jsonl"
    options = ["--text", "sentence", "--label", "label", "--out", tmp_path / "recipe.yaml"]
    done = run_forked_well([recipe.parent / "model", data, *options], program="init", num_ranks=2)
    assert (tmp_path / "recipe.yaml").exists()
    assert "rank 1 leaves lezo-ds init to rank 0" in done.err
    assert "waiting for rank" not in done.err
