"""Joins the process group under any launcher, and reports lost ranks.

A launcher says who a rank is by variables of the environment:

    deepspeed, torchrun    RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    Kubeflow               the same without LOCAL_RANK: one process a node
    srun                   SLURM_PROCID and others, which become those
    mpirun                 OMPI_*, PMI_*; DeepSpeed asks MPI for those
    none, or any for one   this process is the only rank

The heartbeat starts before the group, because a rank may be lost while others join.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import psutil
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)
from torch.distributed.rendezvous import register_rendezvous_handler

from lezo_ds.distributed import heartbeat
from lezo_ds.distributed.accelerator import adapt_to_cpu, fix_arithmetic, take_device
from lezo_ds.distributed.collectives import barrier
from lezo_ds.errors import LostRankError, UserError, one_line

# Phrases of gloo's errors and of no others. gloo raises a plain RuntimeError (torch 2.13).
_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Tt]imed out waiting|timeout caused"
    r"|gloo/transport|Socket closed"
)
# As torch.distributed reads them.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_heartbeats: list[heartbeat.Heartbeat] = []


def init_distributed(timeout_seconds: int = 1800) -> None:
    """Join the process group. A second call does nothing.

    Args:
        timeout_seconds: how long a collective waits for the other ranks.
    """
    fix_arithmetic()
    if comm.is_initialized():
        return
    adapt_to_cpu()
    if not all(name in os.environ for name in _RANK_VARIABLES):
        _set_rank_variables()
    os.environ.setdefault("LOCAL_RANK", "0")
    # Before the first message: otherwise every rank would send it from GPU 0.
    take_device()
    # Before the heartbeat: this sets variables, which its threads read without a lock.
    method = prepare_rendezvous()
    num_ranks = int(os.environ["WORLD_SIZE"])
    if num_ranks > 1:
        limit = min(heartbeat.LIMIT_SECONDS, timeout_seconds)
        _heartbeats.append(heartbeat.Heartbeat(int(os.environ["RANK"]), num_ranks, limit))
        _heartbeats[0].start()
    comm.init_distributed(
        dist_backend=_backends(),
        timeout=timedelta(seconds=timeout_seconds),
        init_method=method,
        verbose=False,
    )
    # A rank that ends at once (bad input) would break the connections of the ranks that still join.
    barrier()
    for each in _heartbeats:
        each.all_joined = True


def _backends() -> str:
    """Return what sends the messages: hosts speak gloo with each other, and GPUs their own."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return "gloo"
    return f"cpu:gloo,{accelerator.device_name()}:{accelerator.communication_backend_name()}"


def shut_down() -> None:
    """Leave the process group.

    A collective: a rank that leaves early would break the messages of the others. The heartbeat
    watches them while they wait for each other.
    """
    if comm.is_initialized():
        barrier()
    while _heartbeats:
        _heartbeats.pop().stopped.set()
    if comm.is_initialized():
        comm.destroy_process_group()
    if "mpi4py.MPI" in sys.modules:
        # Without it, mpirun treats the process as crashed.
        sys.modules["mpi4py.MPI"].Finalize()


@contextmanager
def lost_ranks_reported(state: Callable[[], str]) -> Iterator[None]:
    """Turn an error of a message between ranks into LostRankError, with the `state` of the run.

    If a message never ends, the heartbeat's thread ends the process with the same line and exit
    code.
    """
    heartbeat.states.append(state)
    try:
        yield
    except RuntimeError as error:
        lost = lost_rank(error)
        if lost is None:
            raise
        raise lost from error
    finally:
        heartbeat.states.pop()


def lost_rank(error: Exception) -> LostRankError | None:
    """Return what an error of a message between ranks means, and None for another error."""
    problem = one_line(error)
    if not isinstance(error, DistError) and not _LOST.search(problem):
        return None
    return heartbeat.lost_rank_error(problem[:200])


def _set_rank_variables() -> None:
    launcher = launcher_of(os.environ)
    if launcher == "mpirun":
        _ask_mpi()
    elif launcher == "srun":
        os.environ.update(slurm_rank_variables(os.environ))
    else:
        given = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
        if given:
            missing = [name for name in _RANK_VARIABLES if name not in os.environ]
            raise UserError(
                f"the environment has {' and '.join(given)} without {', '.join(missing)}",
                fix=f"set {', '.join(_RANK_VARIABLES)}, or unset them all to start one process",
            )
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")  # any free port


def launcher_of(variables: Mapping[str, str]) -> str:
    """Return which launcher started this process as one of several ranks: mpirun, srun, or "".

    srun may speak PMI or PMIx with its tasks, as mpirun does with its ranks, and what it has told a
    shell stays in the environment of what the shell starts.
    """
    num_of_open_mpi = variables.get("OMPI_COMM_WORLD_SIZE")  # srun never sets it
    num_of_pmi = int(variables.get("PMI_SIZE", "1"))
    num_tasks = int(variables.get("SLURM_STEP_NUM_TASKS", "1"))
    # mpirun inside a Slurm job starts its ranks below srun's tasks, so its number comes first.
    if num_of_open_mpi is not None:
        return "mpirun" if int(num_of_open_mpi) > 1 else ""
    if num_of_pmi not in (1, num_tasks):
        return "mpirun"
    if num_tasks > 1:
        return "srun"
    # Without the others, only MPI knows the number of ranks of PMIx.
    has_number = "PMI_SIZE" in variables or "SLURM_STEP_NUM_TASKS" in variables
    return "mpirun" if "PMIX_RANK" in variables and not has_number else ""


def _ask_mpi() -> None:
    if find_spec("mpi4py") is None:
        raise UserError("a launch by mpirun needs mpi4py", fix="pip install 'lezo_ds[mpi]'")
    from deepspeed.comm.comm import mpi_discovery

    address = os.environ.get("MASTER_ADDR")
    mpi_discovery(distributed_port=int(os.environ.get("MASTER_PORT", "29500")), verbose=False)
    if address is not None:
        os.environ["MASTER_ADDR"] = address
    elif os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # every rank is on this machine


def slurm_rank_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return RANK and the other variables of a task that srun started.

    Task 0 runs on the first node of the step, so the ranks meet there. The port depends on the job
    and the step, and is below those that Linux uses for outgoing connections.
    """
    # The first of each range stays: gpu[07-08,11],big1 becomes gpu07,big1.
    nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", variables["SLURM_STEP_NODELIST"])
    first_node = nodes.split(",")[0]
    meeting = 16 * int(variables["SLURM_JOB_ID"]) + int(variables["SLURM_STEP_ID"])
    port = 10_000 + meeting % 20_000
    return {
        "RANK": variables["SLURM_PROCID"],
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": variables.get("MASTER_ADDR", first_node),
        "MASTER_PORT": variables.get("MASTER_PORT", str(port)),
    }


def prepare_rendezvous() -> str:
    """Return the `init_method` for torch's process group.

    torch's own store is not authenticated and listens on every address (PyTorch issue 173909, torch
    2.13). Ours listens at MASTER_ADDR only. If that is the loopback, gloo and NCCL use it, too,
    unless told otherwise. Else gloo uses the interface towards it: by itself, it takes that of this
    machine's name, which others may not reach. Ranks that torchrun started use torchrun's own
    store.
    """
    host = os.environ["MASTER_ADDR"]
    if is_loopback(host):
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback)
    else:
        with suppress(OSError):  # nobody knows the host: rank 0 says so
            own = address_towards(host, int(os.environ["MASTER_PORT"]))
            for name, addresses in psutil.net_if_addrs().items():
                if own in (each.address for each in addresses) and not is_loopback(own):
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "env://"
    return "lezo://"


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_at(host: str, port: int) -> int | None:
    """Return a descriptor that listens on the host's address only, or None if that cannot be.

    torch then listens on all addresses. The other machines may know this one by an address that it
    does not have: its own name may resolve to its loopback, or the address may belong to a machine
    that forwards.

    Raises:
        UserError: another process has the port, or nobody knows the host.
    """
    try:
        family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        address = str(found[0])
        if is_loopback(address) and not is_loopback(host):
            return None
        return socket.create_server((address, port), family=family, backlog=4096).detach()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise UserError(
            f"rank 0 cannot listen on {host}, port {port}: {error}",
            fix="set MASTER_ADDR or MASTER_PORT "
            "(with the deepspeed launcher: --master_addr, --master_port)",
        ) from error


def open_store(host: str) -> TCPStore:
    """Return a store for other replicas, which listens on a free port of this address only."""
    descriptor = listen_at(host, 0)
    assert descriptor is not None, "the address is one of this machine"
    return TCPStore(host, 0, None, True, wait_for_workers=False, master_listen_fd=descriptor)


def address_towards(host: str, port: int) -> str:
    """Return the IPv4 address of this machine in the network of a host."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # chooses a network and sends nothing
        return str(probe.getsockname()[0])


def join_group(
    store: str, name: str, position: int, num_members: int, own_host: str, timeout: timedelta
) -> ProcessGroupGloo:
    """Return a group of this process and processes of other launches.

    Args:
        store: HOST:PORT of the store where they meet.
        name: of the group, which no other group in this store has.
        position: rank of this process in the group.
        num_members: number of processes in the group.
        own_host: address of this machine in the network of the others.
        timeout: how long to wait for the others.
    """
    host, _, port = store.rpartition(":")
    client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    # No public options have devices (torch 2.13).
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=own_host)]
    return ProcessGroupGloo(PrefixStore(name, client), position, num_members, options)


def _meet(_: str, timeout: timedelta, **__: Any) -> Iterator[tuple[TCPStore, int, int]]:
    """Yield the store of the process group, this rank and the number of ranks. torch calls it."""
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    # The heartbeat is the first to end this process if another rank never comes.
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=2 * timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listen_at(host, port) if rank == 0 else None,
    )
    # torch asks for a second item only if ranks join again.
    yield store, rank, world_size


register_rendezvous_handler("lezo", _meet)  # type: ignore[no-untyped-call]
