"""Joins the process group under any launcher, and reports lost ranks."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from deepspeed import comm
from torch.distributed import DistError, PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from lezo_ds.distributed import heartbeat
from lezo_ds.distributed.accelerator import adapt_to_cpu, fix_arithmetic, take_device
from lezo_ds.errors import LostRankError, UserError

# Phrases of gloo's errors and of no others. gloo raises a plain RuntimeError (torch 2.13).
_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Tt]imed out waiting|timeout caused|gloo/transport|Socket closed"
)
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_heartbeats: list[heartbeat.Heartbeat] = []


def init_distributed(timeout_seconds: int = 1800) -> None:
    """Join the process group. A collective waits for the other ranks for so long. A second call does nothing.

    A process that no launcher started is the only rank.
    """
    fix_arithmetic()
    if comm.is_initialized():
        return
    adapt_to_cpu()
    if not all(name in os.environ for name in _RANK_VARIABLES):
        _set_rank_variables()
    take_device()  # before the first message: otherwise every rank would send it from GPU 0
    method = (
        prepare_rendezvous()
    )  # sets variables, which the heartbeat's threads read without a lock
    if (num_ranks := int(os.environ["WORLD_SIZE"])) > 1:
        limit = min(heartbeat.LIMIT_SECONDS, timeout_seconds)
        _heartbeats.append(heartbeat.Heartbeat(int(os.environ["RANK"]), num_ranks, limit))
        _heartbeats[0].start()
    comm.init_distributed(
        timeout=timedelta(seconds=timeout_seconds), init_method=method, verbose=False
    )
    # A rank that ends at once (bad input) would break the connections of the ranks that still join.
    comm.barrier()
    for each in _heartbeats:
        each.all_joined = True


def shut_down() -> None:
    """Leave the process group. A collective: a rank that leaves early breaks the messages of the others."""
    while _heartbeats:
        _heartbeats.pop().stopped.set()
    if comm.is_initialized():
        comm.barrier()
        comm.destroy_process_group()
    if "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].Finalize()  # without it, mpirun treats the process as crashed


@contextmanager
def lost_ranks_reported(state: Callable[[], str]) -> Iterator[None]:
    """Turn an error of a message between ranks into LostRankError, with the `state` of the run.

    If a message never ends, the heartbeat's thread ends the process with the same line and exit code.
    """
    heartbeat.states.append(state)
    try:
        yield
    except RuntimeError as error:
        if lost := lost_rank(error):
            raise lost from error
        raise
    finally:
        heartbeat.states.pop()


def lost_rank(error: RuntimeError) -> LostRankError | None:
    """Return what an error of a message between ranks means, and None for another error."""
    text = " ".join(str(error).split())
    is_lost = isinstance(error, DistError) or _LOST.search(text)
    return heartbeat.lost_rank_error(text[:200]) if is_lost else None


def _set_rank_variables() -> None:
    # mpirun inside a Slurm job starts its ranks below srun's tasks, so MPI's variables take precedence.
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        _ask_mpi()
    elif int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        os.environ.update(slurm_rank_variables(os.environ))
    elif any(name in os.environ for name in ("PMI_SIZE", "PMIX_RANK")):
        _ask_mpi()
    else:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")  # any free one


def _ask_mpi() -> None:
    from deepspeed.comm.comm import mpi_discovery

    address = os.environ.get("MASTER_ADDR")
    mpi_discovery(distributed_port=int(os.environ.get("MASTER_PORT", "29500")), verbose=False)
    if address is not None:
        os.environ["MASTER_ADDR"] = address
    elif os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # every rank is on this machine


def slurm_rank_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return RANK and the other variables of a task that srun started. Task 0 runs on the step's first node.

    The port depends on the job and the step, and is below those that Linux uses for outgoing connections.
    """
    # keeps the first of each range: gpu[07-08,11],big1 is gpu07,big1
    nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", variables["SLURM_STEP_NODELIST"])
    meeting = 16 * int(variables["SLURM_JOB_ID"]) + int(variables["SLURM_STEP_ID"])
    return {
        "RANK": variables["SLURM_PROCID"],
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": variables.get("MASTER_ADDR", nodes.split(",")[0]),
        "MASTER_PORT": variables.get("MASTER_PORT", str(10_000 + meeting % 20_000)),
    }


def prepare_rendezvous() -> str:
    """Return the `init_method` for torch's process group.

    torch's own store is not authenticated and listens on every address (PyTorch issue 173909, torch 2.13).
    Ours listens at MASTER_ADDR only. If that is the loopback, gloo and NCCL use it too unless told otherwise.
    Ranks that torchrun started use torchrun's own store.
    """
    if is_loopback(os.environ["MASTER_ADDR"]):
        loopbacks = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopbacks[0] if loopbacks else "lo")
    return "env://" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "lezo://"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen_at(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on the host's address only, or None: torch then listens on all of them.

    The other machines may know this one by an address that it does not have: its own name may resolve to its
    loopback, or the address may belong to a machine that forwards.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if is_loopback(str(address[0])) and not is_loopback(host):
            return None
        return socket.create_server((str(address[0]), port), family=family, backlog=4096)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise UserError(
            f"rank 0 cannot listen on {host}, port {port}: {error}",
            fix="set MASTER_ADDR or MASTER_PORT (with the deepspeed launcher: --master_addr, --master_port)",
        ) from error


def open_store(host: str) -> TCPStore:
    """Return a store for other replicas, which listens on a free port of this address only."""
    listener = listen_at(host, 0)
    assert listener is not None, "the address is one of this machine"
    return TCPStore(host, 0, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def address_towards(host: str, port: int) -> str:
    """Return the IPv4 address of this machine in the network of a host."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def join_group(
    store: str, name: str, position: int, num: int, own_address: str, timeout: timedelta
) -> ProcessGroupGloo:
    """Return a group of processes of other launches. They meet in a store, HOST:PORT, by a new name."""
    host, _, port = store.rpartition(":")
    client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no public one has devices (2.13)
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
    return ProcessGroupGloo(PrefixStore(name, client), position, num, options)


def _meet(_: str, timeout: timedelta, **__: Any) -> Iterator[tuple[TCPStore, int, int]]:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listener = listen_at(host, port) if rank == 0 else None
    descriptor = None if listener is None else listener.detach()
    # The heartbeat is the first to end this process if another rank never comes.
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=2 * timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )
    yield store, rank, world_size  # torch asks for a second item only if ranks join again


register_rendezvous_handler("lezo", _meet)  # type: ignore[no-untyped-call]
