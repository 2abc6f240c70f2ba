"""A process group whose other ranks do not exist, to count what a sharded step costs the host of one rank."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed import comm
from deepspeed.comm.torch import TorchBackend
from torch import Tensor


def join_fake_group(world_size: int) -> None:
    """Make this process rank 0 of a group that exists nowhere else. Call this before anything else.

    torch's fake process group sends nothing. A gather repeats this rank's part, so weights are finite but
    wrong. A sum is that of ranks that all have the values of this one, so that agreement is found.
    """
    # torch has no public way to this group; its own tests use it like this (2.13).
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size), MASTER_ADDR="", MASTER_PORT="0")
    # DeepSpeed would compile its shared-memory all-reduce for CPUs, which nothing here uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    comm.init_distributed(verbose=False)
    TorchBackend.all_reduce = _sum_of_equals


def _sum_of_equals(_backend: TorchBackend, tensor: Tensor, *_: Any, group: Any = None, **__: Any) -> None:  # noqa: ANN401
    tensor.mul_(dist.get_world_size(group))
