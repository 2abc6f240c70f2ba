"""The device of this rank, what it computes with, and changes to DeepSpeed that CPUs need."""

from __future__ import annotations

import os
import platform
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.torch import TorchBackend
from torch import Tensor

from lezo_ds.errors import LezoError, UserError, cut, one_line

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def local_rank() -> int:
    """Return the index of this rank on its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device(get_accelerator().current_device_name())


def take_device() -> None:
    """Make this rank's own GPU, if it has one, the current device.

    Raises:
        UserError: the node has fewer visible GPUs than ranks.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return
    num_visible = accelerator.device_count()
    if local_rank() >= num_visible:
        raise UserError(
            f"rank {local_rank()} of its node has no GPU of its own: it sees {num_visible}",
            fix="start fewer ranks or correct CUDA_VISIBLE_DEVICES "
            "(Slurm: --gpus-per-node, not -per-task)",
        )
    accelerator.set_device(local_rank())
    # torch warns of each barrier of DeepSpeed, which names no GPU. It is the one of the line above.
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")


def adapt_to_cpu() -> None:
    """On a CPU, change DeepSpeed for this process, before the process group is made.

    docs/deepspeed.md lists what this relies on.
    """
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed would compile an all-reduce that is not used here, and that may fail (its issue
        # 7108).
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        TorchBackend.all_gather_into_tensor = _gather_by_broadcasts


class _Works(list[Any]):
    """Several messages that DeepSpeed waits for as if they were one."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def _gather_by_broadcasts(
    _backend: TorchBackend,
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
) -> _Works:
    """Do what TorchBackend.all_gather_into_tensor does, with gloo in a fifth of the time.

    Each rank broadcasts its shard. gloo's all-gather copies all that it sends and receives through
    temporary buffers (torch 2.13), and its broadcast does not.
    """
    ranks = dist.get_process_group_ranks(group)
    shards = output_tensor.view(len(ranks), -1)  # [ranks, elements of a shard]
    own_shard = shards[dist.get_rank(group)]
    if own_shard.data_ptr() != input_tensor.data_ptr():
        own_shard.copy_(input_tensor.view(-1))
    works = _Works()
    for shard, rank in zip(shards, ranks, strict=True):
        works.append(dist.broadcast(shard, rank, group, async_op=True))
    if not async_op:
        works.wait()
    return works


def fix_arithmetic() -> None:
    """Switch off what trades precision for speed in products.

    cuBLAS repeats its results if its workspace has a fixed size (its documentation, "Results
    reproducibility"). torch gives it one, which CUBLAS_WORKSPACE_CONFIG can only change. The
    variable is not set here: torch 2.11 reads it again at every product, 0.2 ms each on an H200.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def supports_fp16() -> bool:
    """Return whether the devices of the ranks compute in fp16. Some processors do not."""
    return bool(get_accelerator().is_fp16_supported())


def describe_arithmetic(device: torch.device) -> dict[str, str]:
    """Return, by name, what decides the last bits of a result besides the versions of libraries."""
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        # torch uses the widest instructions that the CPU has.
        processor = f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    return {
        "processor": processor,
        # `fix_arithmetic` switches both off, but this variable overrules it.
        "TF32": "on" if os.environ.get("NVIDIA_TF32_OVERRIDE") == "1" else "off",
        "reduced-precision reductions": "off",
        _WORKSPACE: os.environ.get(_WORKSPACE, "not set"),
    }


def out_of_memory(error: Exception) -> LezoError | None:
    """Return what an error of an allocation means, on a GPU or a CPU, and None for another error.

    On a CPU, torch raises a plain RuntimeError (torch 2.13).
    """
    is_of_cpu = "can't allocate memory" in str(error)
    if not is_of_cpu and not isinstance(error, torch.OutOfMemoryError | MemoryError):
        return None
    problem = cut(one_line(error), 300)
    return LezoError(
        f"there is too little memory: {problem}; fix: halve train.eval_batch_size, "
        "train.micro_batch_size or data.max_length, or use more ranks"
    )


def free_memory() -> int:
    """Return the bytes that are free on this rank's GPU, or on its host if it computes there."""
    if device().type == "cuda":
        return torch.cuda.mem_get_info()[0]
    return int(get_accelerator().available_memory())


def cpu_name() -> str:
    """Return the name of this machine's CPU, or of its architecture if Linux does not tell it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
