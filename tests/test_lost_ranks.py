"""Runs that lose a rank, or have one that hangs: they end in time, say where they are, and resume."""

from __future__ import annotations

import re
import signal

import psutil
import pytest
from assets import write_recipe
from commands import deepspeed, mpirun, python, run_well, start
from test_kill_and_resume import num_steps, reaches, wait_until
from test_stop import STEP, STEPS, arguments, results_of, wait_for_end, wait_for_ranks, without_header

from lezo_ds import distributed
from lezo_ds.errors import LostRankError

pytestmark = pytest.mark.distributed

TIMEOUT_SECONDS = 5
EXIT_CODE = LostRankError.exit_code
STARTERS = {"deepspeed": deepspeed, "mpirun": mpirun}
RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run_well(python(*arguments(recipe, run_dir)))
    return results_of(run_dir)["weights_digest"], without_header(run_dir)


def ranks_of(process):
    """Return the processes of all ranks that a launcher has started, by rank."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        variables = child.environ()
        rank = next((variables[name] for name in RANK_NAMES if name in variables), None)
        if rank is not None and "train.py" in " ".join(child.cmdline()):
            found.setdefault(int(rank), child)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize(
    ("starter", "number", "victim"),
    [
        ("deepspeed", signal.SIGKILL, 0),
        ("deepspeed", signal.SIGSTOP, 1),
        ("mpirun", signal.SIGKILL, 1),
        ("mpirun", signal.SIGSTOP, 0),
    ],
    ids=["deepspeed_dead", "deepspeed_hung", "mpirun_dead", "mpirun_hung"],
)
def test_a_dead_or_hung_rank_ends_the_run_which_names_the_last_good_step(
    starter, number, victim, recipe, undisturbed, tmp_path
):
    given = [*arguments(recipe, tmp_path), f"train.timeout_seconds={TIMEOUT_SECONDS}"]
    with start(STARTERS[starter](2, *given)) as process:
        wait_until(lambda: reaches(tmp_path, STEP, 4), process)
        ranks = ranks_of(process)
        assert len(ranks) == 2
        ranks[victim].send_signal(number)
        err, seconds = wait_for_end(process)
        wait_for_ranks(ranks)
    print(f"\n{starter}, rank {victim} {number.name}: ended after {seconds:.1f} s, code {process.returncode}")
    assert process.returncode != 0
    named = re.findall(r"error: another rank has ended.*?last good step: (\d+);", err)
    if starter == "deepspeed" or number == signal.SIGSTOP:  # mpirun ends the others of a dead rank itself
        assert len(named) == 1, err[-5000:]
    if named:
        # The step in flight may have been journaled by rank 0 before it came to an end on rank 1.
        assert int(named[0]) in (num_steps(tmp_path) - 1, num_steps(tmp_path) - 2)
    run_well(python(*given))
    assert results_of(tmp_path)["steps"] == STEPS
    assert (results_of(tmp_path)["weights_digest"], without_header(tmp_path)) == undisturbed


@pytest.mark.parametrize(
    "text",
    ["[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234", "Timed out waiting"],
)
def test_errors_of_messages_are_told_from_all_others(text):
    with (
        pytest.raises(LostRankError, match=r"not answered in time; got: .*; last good step: 7; fix: "),
        distributed.lost_ranks_reported(lambda: "last good step: 7"),
    ):
        raise RuntimeError(text)
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        distributed.lost_ranks_reported(lambda: "last good step: 7"),
    ):
        raise RuntimeError("out of memory")
