"""Joins the process group under any launcher, and reports lost ranks."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

from deepspeed import comm
from torch.distributed import DistError

from lezo_ds.distributed import heartbeat, rendezvous
from lezo_ds.distributed.accelerator import adapt_to_cpu, take_device
from lezo_ds.distributed.arithmetic import fix_arithmetic

# Phrases that occur in gloo's errors and in no others. gloo raises a plain RuntimeError (torch 2.13).
_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Tt]imed out waiting|timeout caused|gloo/transport|Socket closed"
)
_heartbeats: list[heartbeat.Heartbeat] = []
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_distributed(timeout_seconds: int = 1800) -> None:
    """Join the process group, with the arithmetic of `fix_arithmetic`. A second call does nothing.

    The `deepspeed` launcher and torchrun set RANK and the other variables. For srun they are derived from
    SLURM_*, and for mpirun mpi4py provides them. A process that none of these started is the only rank.

    Args:
        timeout_seconds: how long a collective waits for the other ranks.

    Raises:
        UserError: this rank has no GPU of its own, or rank 0 cannot listen on MASTER_ADDR and MASTER_PORT.
    """
    fix_arithmetic()
    if comm.is_initialized():
        return
    adapt_to_cpu()
    if not all(name in os.environ for name in _RANK_VARIABLES):
        _set_rank_variables()
    take_device()  # before the first message: otherwise every rank would send it from GPU 0
    timeout = timedelta(seconds=timeout_seconds)
    comm.init_distributed(timeout=timeout, init_method=rendezvous.prepare(), verbose=False)
    if comm.get_world_size() > 1:
        limit = min(heartbeat.LIMIT_SECONDS, timeout_seconds)
        _heartbeats.append(heartbeat.Heartbeat(comm.get_rank(), comm.get_world_size(), limit))
    # No rank returns before all have joined. Otherwise a rank that ends at once, for example because of bad
    # input, would break the connections of the ranks that are still joining.
    comm.barrier()
    for beating in _heartbeats:
        beating.start()


@contextmanager
def lost_ranks_reported(state: Callable[[], str]) -> Iterator[None]:
    """Turn an error of a message between ranks into one that says that another rank is lost.

    If the message never ends, the heartbeat finds the lost rank and ends the process with the same line.

    Args:
        state: returns a description of the run for the error, such as its last good step.

    Raises:
        LostRankError: a message between ranks failed.
    """
    try:
        with heartbeat.ending_if_lost(state):
            yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if not (isinstance(error, DistError) or _LOST.search(text)):
            raise
        raise heartbeat.lost_rank_error(text[:200], state()) from error


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
        os.environ.setdefault("MASTER_PORT", str(free_port()))


def _ask_mpi() -> None:
    from deepspeed.comm.comm import mpi_discovery

    given = os.environ.get("MASTER_ADDR")
    mpi_discovery(distributed_port=int(os.environ.get("MASTER_PORT", "29500")), verbose=False)
    if given is not None:
        os.environ["MASTER_ADDR"] = given
    elif os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # every rank is on this machine


def slurm_rank_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return RANK and the other variables of a task that srun started.

    The address is the first node of the job step, where task 0 runs. The port is derived from the numbers of
    the job and the step, and it is below the range that Linux uses for outgoing connections. A MASTER_ADDR or
    MASTER_PORT that is already set is kept.

    Args:
        variables: SLURM_* of the task.

    >>> ours = slurm_rank_variables(
    ...     {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7",
    ...      "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-08,11],big1"}
    ... )
    >>> ours["MASTER_ADDR"], ours["MASTER_PORT"]
    ('gpu07', '10112')
    """
    nodes = re.sub(
        r"\[(\d+)[^]]*\]", r"\1", variables["SLURM_STEP_NODELIST"]
    )  # keeps the first of each range
    meeting = 16 * int(variables["SLURM_JOB_ID"]) + int(variables["SLURM_STEP_ID"])
    return {
        "RANK": variables["SLURM_PROCID"],
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": variables.get("MASTER_ADDR", nodes.split(",")[0]),
        "MASTER_PORT": variables.get("MASTER_PORT", str(10_000 + meeting % 20_000)),
    }


def free_port() -> int:
    """Return a TCP port that is free on this machine at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shut_down() -> None:
    """Leave the process group. A collective: a rank that leaves early breaks the messages of the others."""
    while _heartbeats:
        _heartbeats.pop().stop()
    if comm.is_initialized():
        comm.barrier()
        comm.destroy_process_group()
    if "mpi4py.MPI" in sys.modules:
        # mpirun treats a process that ends without this call as crashed.
        sys.modules["mpi4py.MPI"].Finalize()
