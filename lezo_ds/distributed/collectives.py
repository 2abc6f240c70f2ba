"""Exchange of scalars and small objects between ranks, through deepspeed.comm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.comm.comm import comms_logger, timers

from lezo_ds.distributed.accelerator import device
from lezo_ds.errors import LezoError

_T = TypeVar("_T")


def rank() -> int:
    """Return the rank of this process. It is 0 before the process group starts."""
    return comm.get_rank() if comm.is_initialized() else 0


def world_size(group: Any = None) -> int:  # noqa: ANN401
    """Return the number of ranks in a process group (None: all ranks), or 1 before the first group starts."""
    return comm.get_world_size(group) if comm.is_initialized() else 1


def barrier() -> None:
    """Wait for all ranks."""
    comm.barrier()


def broadcast_bytes(data: bytes, num_bytes: int) -> bytes:
    """Return rank 0's `data`, of length `num_bytes`, on every rank. One broadcast."""
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    if rank() == 0:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    buffer = buffer.to(device())
    comm.broadcast(buffer, 0)
    return bytes(buffer.cpu().numpy())


def broadcast_object(value: Any) -> Any:  # noqa: ANN401
    """Return rank 0's value on every rank. It is pickled, which is too slow to do in every step."""
    box = [value]
    comm.broadcast_object_list(box, 0, device=device())
    return box[0]


def gather_objects(value: Any) -> list[Any]:  # noqa: ANN401
    """Return the values of all ranks, by rank. They are pickled, which is too slow to do in every step."""
    values: list[Any] = [None] * world_size()
    # deepspeed.comm's function ends the process if its logger is on (0.19.8).
    dist.all_gather_object(values, value)
    return values


def gather_integers(values: Sequence[int]) -> list[list[int]]:
    """Return the integers of all ranks, by rank. Each is in [-2**63, 2**63), and every rank has as many."""
    mine = torch.tensor(values, dtype=torch.int64, device=device())
    gathered = mine.new_empty(world_size() * len(values))
    comm.all_gather_into_tensor(gathered, mine)
    return gathered.view(world_size(), len(values)).tolist()


def sum_vector(values: torch.Tensor) -> list[float]:
    """Return the element-wise sum over all ranks of a float64 vector on this rank's device. One all-reduce.

    The sum of an element is exact if the element is nonzero on at most one rank.
    """
    comm.all_reduce(values)
    return values.cpu().tolist()


def sum_integers(values: Sequence[int], group: Any = None) -> list[int]:  # noqa: ANN401
    """Return the element-wise sum of integers in [-2**63, 2**63) over the ranks, modulo 2**64 and signed."""
    vector = torch.tensor(values, dtype=torch.int64, device=device())
    comm.all_reduce(vector, group=group)
    return vector.cpu().tolist()


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Count the bytes that this rank passes to each operation of deepspeed.comm inside the context.

    The dict is filled when the context ends. Operations run one after the other while they are counted. A
    rank passes its part to an all-gather, and the whole tensor to a reduction or a broadcast.
    """
    counts: dict[str, int] = {}
    comm.configure(enabled=True, prof_all=True, verbose=False)
    comms_logger.reset_data()
    # Timers of earlier messages would stay: on a GPU, each message would wait for the events of all of them.
    timers.timers.clear()
    try:
        yield counts
    finally:
        comm.configure(enabled=False)
    for operation, sizes in comms_logger.get_raw_data().items():
        counts[operation] = sum(size * entry[0] for size, entry in sizes.items())


def on_rank_zero(action: Callable[[], _T]) -> _T:
    """Run `action` on rank 0 and return its result, or raise its LezoError, on every rank. A collective."""
    outcome: tuple[Any, LezoError | None] = (None, None)
    if rank() == 0:
        try:
            outcome = (action(), None)
        except LezoError as error:
            outcome = (None, error)
    value, problem = broadcast_object(outcome)
    if problem is not None:
        raise problem
    return value  # type: ignore[no-any-return]
