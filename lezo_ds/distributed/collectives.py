"""Exchange of scalars and small objects between ranks, through deepspeed.comm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed import comm

from lezo_ds.distributed.accelerator import device
from lezo_ds.errors import LezoError

_T = TypeVar("_T")


def rank() -> int:
    """Return the rank of this process. It is 0 before the process group starts."""
    return comm.get_rank() if comm.is_initialized() else 0


def world_size(group: Any = None) -> int:
    """Return the number of ranks in a process group (None: all ranks), 1 before it starts."""
    return comm.get_world_size(group) if comm.is_initialized() else 1


def barrier() -> None:
    """Wait until all ranks are here. A collective."""
    index = device().index
    # DeepSpeed binds a single rank to no GPU, and torch would warn that it has to guess one.
    comm.barrier(device_ids=None if index is None else [index])


def broadcast_bytes(data: bytes, num_bytes: int) -> bytes:
    """Return rank 0's `data`, of length `num_bytes`, on every rank. One broadcast between hosts.

    The `data` of other ranks does not count. No rank waits for its GPU.
    """
    content = bytearray(num_bytes)
    if rank() == 0:
        content[:] = data
    comm.broadcast(torch.frombuffer(content, dtype=torch.uint8), 0)
    return bytes(content)


def broadcast_object(value: Any) -> Any:
    """Return rank 0's value on every rank. Pickling it is too slow for every step."""
    box = [value]
    comm.broadcast_object_list(box, 0, device=torch.device("cpu"))
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank. Pickling them is too slow for every step."""
    values: list[Any] = [None] * world_size()
    # Not deepspeed.comm's, which ends the process if its logger is on (docs/deepspeed.md).
    dist.all_gather_object(values, value)
    return values


def sum_vector(values: torch.Tensor, group: Any = None) -> list[float]:
    """Return the sum over the ranks of a vector on this rank's device. One all-reduce.

    The vector is of float64, or of int64, whose sums are integers modulo 2**64.
    """
    return sum_tensor(values, group).cpu().tolist()


def sum_tensor(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return the sum over the ranks of a tensor on this rank's device, in place. One all-reduce."""
    comm.all_reduce(values, group=group)
    return values


def on_rank_zero(action: Callable[[], _T]) -> _T:
    """Run `action` on rank 0 and return its result on every rank. A collective.

    A LezoError that the action raises is raised on every rank.
    """
    outcome: Any = None
    if rank() == 0:
        try:
            outcome = action()
        except LezoError as error:
            outcome = error
    outcome = broadcast_object(outcome)
    if isinstance(outcome, LezoError):
        raise outcome
    return outcome  # type: ignore[no-any-return]
