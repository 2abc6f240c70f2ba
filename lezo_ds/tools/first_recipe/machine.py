"""The processors of this machine, as far as the first recipe depends on them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch

from lezo_ds import distributed
from lezo_ds.config.schema import Dtype

_MAX_CPU_RANKS = 8


@dataclass(frozen=True)
class Machine:
    """What ranks would compute on.

    Attributes:
        is_gpu: whether they are GPUs.
        num_ranks: one for each GPU, or a power of two that is not above the number of cores.
        num_bytes: memory of each GPU, or of the whole machine if it has none.
        dtype: the type of weights that suits the processors.
        why: why this type, in words.
    """

    is_gpu: bool
    num_ranks: int
    num_bytes: int
    dtype: Dtype
    why: str

    def __str__(self) -> str:
        """Return the processors in words."""
        gib = f"{self.num_bytes / 2**30:.0f} GiB"
        if self.is_gpu:
            return f"{self.num_ranks} GPU{'s' * (self.num_ranks > 1)} of {gib}"
        return f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)} on CPU cores, {gib} of memory"


def this_machine() -> Machine:
    """Return what ranks on this machine would compute on, as DeepSpeed finds it."""
    if distributed.device().type == "cpu":
        return _cpus()
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Machine(
        is_gpu=True,
        num_ranks=torch.cuda.device_count(),
        num_bytes=torch.cuda.get_device_properties(0).total_memory,
        dtype="bf16" if has_bf16 else "fp16",
        why="these GPUs compute in bf16" if has_bf16 else "these GPUs have no bf16",
    )


def _cpus() -> Machine:
    num_cores = min(len(os.sched_getaffinity(0)), psutil.cpu_count(logical=False) or 1, _MAX_CPU_RANKS)
    found = torch.cpu.get_capabilities()
    has_bf16 = any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    why = "has instructions for bf16" if has_bf16 else "has no instructions for bf16"
    return Machine(
        is_gpu=False,
        num_ranks=1 << (num_cores.bit_length() - 1),
        num_bytes=psutil.virtual_memory().total,
        dtype="bf16" if has_bf16 else "fp32",
        why=f"this CPU {why}",
    )
