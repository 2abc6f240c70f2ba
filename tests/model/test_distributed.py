"""How ranks meet and where they listen, what they compute with, and how a lost one is found."""

import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from commands import run_forked, wait_until
from deepspeed import comm
from ranks import free_port, run_ranks
from torch.distributed import TCPStore

from lezo_ds import distributed
from lezo_ds.distributed import heartbeat, start
from lezo_ds.distributed.accelerator import describe_arithmetic, fix_arithmetic
from lezo_ds.errors import UserError

pytestmark = pytest.mark.distributed

QUICK = Path(__file__).parents[1] / "helpers" / "quick_heartbeat_train.py"

# Meeting.


def _listening(address):
    os.environ["MASTER_ADDR"] = address
    distributed.init_distributed()
    mine = psutil.Process().net_connections("inet")
    addresses = {each.laddr.ip for each in mine if each.status == psutil.CONN_LISTEN}
    return addresses, distributed.sum_vector(torch.tensor([1]))


@pytest.mark.parametrize("address", ["localhost", "127.0.0.2"])
def test_ranks_listen_at_the_address_where_they_meet_and_on_the_loopback_only(address):
    """127.0.0.2 stands for a machine's second interface."""
    results = run_ranks(_listening, 2, address)
    assert [number for _, number in results] == [[2], [2]]
    assert set.union(*(addresses for addresses, _ in results)) <= {"127.0.0.1", "::1", address}
    assert address == "localhost" or address in results[0][0]


def test_a_listener_has_its_address_and_one_of_another_machine_is_left_to_torch(monkeypatch):
    port = free_port()
    with socket.socket(fileno=start.listen_at("127.0.0.1", port)) as listener:
        assert start.is_loopback(listener.getsockname()[0])
        with pytest.raises(UserError, match=rf"cannot listen on .*, port {port}.*master_port"):
            start.listen_at("127.0.0.1", port)
    assert start.listen_at("192.0.2.77", free_port()) is None
    with pytest.raises(UserError, match=r"rank 0 cannot listen on no\.such\.host\.invalid"):
        start.listen_at("no.such.host.invalid", 29500)
    # A machine's own name may stand for its loopback, and its peers know it by another address.
    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    assert start.listen_at("node-1", 29500) is None


@pytest.mark.parametrize(
    ("address", "users", "interface"),
    [("127.0.0.1", "", "lo"), ("localhost", "eth7", "eth7"), ("10.0.0.1", "", "none")],
)
def test_the_libraries_stay_on_the_loopback_unless_told(address, users, interface, monkeypatch):
    variables = {"GLOO_SOCKET_IFNAME": users, "NCCL_SOCKET_IFNAME": users} if users else {}
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": "29500"}
    monkeypatch.setattr(os, "environ", meeting | variables)
    assert start.prepare_rendezvous() == "lezo://"
    assert os.environ.get("NCCL_SOCKET_IFNAME", "none").startswith(interface)
    # gloo alone has to be told which of the others it is.
    assert os.environ.get("GLOO_SOCKET_IFNAME", "none").startswith("lo") == (interface == "lo")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    assert start.prepare_rendezvous() == "env://"


def _changes_beside_threads():
    changes = []

    def note(event, arguments):
        if event in ("os.putenv", "os.unsetenv") and threading.active_count() > 1:
            changes.append(arguments[0])

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    sys.addaudithook(note)
    distributed.init_distributed()
    distributed.address_towards("127.0.0.1", 29510)
    return changes


def test_the_environment_does_not_change_once_threads_may_read_it():
    """glibc's getenv, which resolves names, may read memory that setenv has freed: a crash."""
    assert run_ranks(_changes_beside_threads, 2) == [[], []]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1,n2", "n1"),
        ("gpu[007,009-011],big[1-3]", "gpu007"),
        ("rack[2-3]node[05-08].site", "rack2node05.site"),
    ],
)
def test_a_slurm_task_is_a_rank_that_meets_the_others_at_the_first_node(nodes, first):
    task = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    task |= {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": nodes}
    own = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}
    ranks = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    meeting = {"MASTER_ADDR": first, "MASTER_PORT": "10112"}
    assert start.slurm_rank_variables(task) == ranks | meeting
    assert start.slurm_rank_variables(task | own) == ranks | own


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ("", ""),
        ("SLURM_PROCID=0", ""),  # a batch script outside srun
        ("SLURM_STEP_NUM_TASKS=1", ""),
        ("SLURM_STEP_NUM_TASKS=1 PMI_SIZE=1 PMI_RANK=0", ""),
        ("SLURM_STEP_NUM_TASKS=4", "srun"),
        ("SLURM_STEP_NUM_TASKS=4 PMI_SIZE=4 PMI_RANK=3", "srun"),
        ("SLURM_STEP_NUM_TASKS=2 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=1", "mpirun"),
        ("SLURM_STEP_NUM_TASKS=2 PMI_SIZE=8 PMI_RANK=7", "mpirun"),  # MPICH starts its own by srun
        ("SLURM_STEP_NUM_TASKS=2 PMI_SIZE=1 PMI_RANK=0", "srun"),  # below a shell of srun --pty
        ("OMPI_COMM_WORLD_SIZE=1 PMIX_RANK=0", ""),
        ("PMI_SIZE=1 PMI_RANK=0", ""),
        ("PMI_SIZE=2 PMI_RANK=0", "mpirun"),
        ("PMIX_RANK=0", "mpirun"),
    ],
)
def test_srun_is_told_from_mpirun_and_a_single_rank_needs_neither(variables, launcher):
    assert start.launcher_of(dict(word.split("=") for word in variables.split())) == launcher


def _ranks_of_one_process_a_node():
    """As Kubeflow starts them."""
    del os.environ["LOCAL_RANK"]
    distributed.init_distributed()
    return distributed.world_size(), distributed.local_rank()


def test_ranks_of_one_process_a_node_need_no_local_rank():
    assert run_ranks(_ranks_of_one_process_a_node, 2) == [(2, 0)] * 2


def test_a_rank_that_does_not_know_where_to_meet_is_refused_and_not_the_only_one(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"})
    monkeypatch.setattr(comm, "is_initialized", lambda: False)  # other tests have
    with pytest.raises(UserError, match="RANK and WORLD_SIZE without MASTER_ADDR; fix: "):
        distributed.init_distributed()


def test_what_trades_precision_for_speed_is_switched_off_and_recorded(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    matmul = torch.backends.cuda.matmul  # without GPUs, nothing else reads these
    matmul.allow_tf32 = matmul.allow_bf16_reduced_precision_reduction = True
    fix_arithmetic()
    assert not matmul.allow_tf32
    assert not matmul.allow_bf16_reduced_precision_reduction
    processor, *others = describe_arithmetic(torch.device("cpu")).values()
    assert processor.endswith(f", {torch.backends.cpu.get_cpu_capability()}")
    assert others == ["off", "off", "not set"]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    fix_arithmetic()
    assert list(describe_arithmetic(torch.device("cpu")).values())[1:] == ["on", "off", ":16:8"]


def _be_slow(seconds):
    """Be busy for longer than the limit: once in Python on rank 1, and once in a call on rank 0."""
    heartbeat.LIMIT_SECONDS = 1.5
    distributed.init_distributed()
    with distributed.lost_ranks_reported(lambda: "last good step: none"):
        if distributed.rank() == 1:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                sum(range(100_000))
        distributed.barrier()
        if distributed.rank() == 0:
            time.sleep(seconds)
        distributed.barrier()
    return distributed.sum_vector(torch.tensor([1]))


def test_a_rank_that_is_slow_is_not_lost():
    assert run_ranks(_be_slow, 2, 2.5) == [[2]] * 2


def _end_beside_a_hung_rank():
    heartbeat.LIMIT_SECONDS = 1.5
    distributed.init_distributed()
    if distributed.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    distributed.shut_down()


def test_a_rank_that_hangs_at_the_end_of_a_command_is_found():
    with pytest.raises(AssertionError, match="rank 0: died without an answer"):
        run_ranks(_end_beside_a_hung_rank, 2, timeout=30)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_never_joins_ends_the_start_in_seconds(victim, recipe, tmp_path):
    arguments = ["--config", recipe, f"run_dir={tmp_path / 'run'}"]
    kill = {"grace": 60, "meanwhile": lambda ranks: ranks[victim].kill(), "LIMIT_SECONDS": "3"}
    lost = run_forked(arguments, QUICK, num_ranks=2, **kill)
    assert re.search(f"error: another rank .*: rank {victim} has shown no sign of life", lost.err)
    assert f"waiting for rank {victim} to join at 127.0.0.1, port " in lost.err


@pytest.mark.parametrize("num_ranks", [2, 3], ids=["after the meeting", "while another joins"])
def test_a_rank_that_has_joined_and_is_killed_ends_any_command_in_seconds(num_ranks, recipe):
    port, ends = free_port(), []

    def kill_a_joined_rank(ranks):
        for late in ranks[2:]:
            os.kill(late.pid, signal.SIGSTOP)
        # A store's client waits ever longer between attempts, and might come after the end.
        with socket.socket() as probe:
            wait_until(lambda: probe.connect_ex(("127.0.0.1", port)) == 0, ranks[0])
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        wait_until(lambda: store.add("heartbeat 1", 0), ranks[1])
        ranks[1].kill()
        ranks[0].join(30)
        ends.append(ranks[0].exitcode)
        for late in ranks[2:]:
            late.kill()

    arguments = ["--model", recipe.parent / "model", "--config", recipe, "zo.sparsity=0.5"]
    told = {"COMMAND": "evaluate", "LIMIT_SECONDS": "60", "MASTER_PORT": str(port)}
    lost = run_forked(arguments, QUICK, num_ranks, kill_a_joined_rank, grace=30, **told)
    assert ends == [6] and "Traceback" not in lost.err
    assert re.search("error: another rank has ended, .*; the command has not finish", lost.err)
