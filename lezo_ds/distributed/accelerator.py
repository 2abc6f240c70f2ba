"""The device of this rank, and changes to DeepSpeed that CPUs need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend
from torch import Tensor

from lezo_ds.errors import UserError


def take_device() -> None:
    """Make this rank's own GPU the current device. On a CPU, do nothing.

    Raises:
        UserError: this rank sees fewer GPUs than its node has ranks.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return
    seen = accelerator.device_count()
    if local_rank() >= seen:
        raise UserError(
            f"rank {local_rank()} of its node has no GPU of its own",
            got=f"{seen} visible",
            expected="one GPU for each rank of the node, all of them visible to every rank",
            fix="start fewer ranks or correct CUDA_VISIBLE_DEVICES (Slurm: --gpus-per-node, not -per-task)",
        )
    accelerator.set_device(local_rank())


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device(get_accelerator().current_device_name())


def adapt_to_cpu() -> None:
    """On a CPU, change DeepSpeed for the whole process. Call this before the process group is made.

    Both changes are tested with DeepSpeed 0.19.8. Neither has a setting in DeepSpeed.
    """
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed would compile its shared-memory all-reduce. That takes a compiler and half a minute, and
        # it can fail (DeepSpeed issue 7108). Only `inference_all_reduce` uses it, which is not used here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed gathers all weights through this method, of an instance that it makes itself.
        TorchBackend.all_gather_into_tensor = _gather_by_broadcasts


class _Works:
    """Several asynchronous messages that are waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _gather_by_broadcasts(
    _backend: TorchBackend,
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Any = None,  # noqa: ANN401
    async_op: bool = False,
) -> _Works | None:
    """Do what TorchBackend.all_gather_into_tensor does. With gloo this takes a fifth of the time.

    torch's all-gather for gloo copies everything it sends and receives through temporary buffers. Its
    broadcast does not (torch 2.13).
    """
    ranks = dist.get_process_group_ranks(group)
    parts = output_tensor.view(len(ranks), -1)
    mine = parts[dist.get_rank(group)]
    if mine.data_ptr() != input_tensor.data_ptr():
        mine.copy_(input_tensor.view(-1))
    works = _Works(
        [dist.broadcast(part, rank, group, async_op=True) for part, rank in zip(parts, ranks, strict=True)]
    )
    if async_op:
        return works
    works.wait()
    return None


def local_rank() -> int:
    """Return the index of this rank on its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))
