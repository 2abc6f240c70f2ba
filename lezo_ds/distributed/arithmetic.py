"""What decides the last bits of a result besides versions of libraries: set for every run, and recorded."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DEFAULT_WORKSPACE = ":4096:8"
"""cuBLAS repeats its results if its workspace has a fixed size (its documentation, "Results
reproducibility"). This is the size that torch 2.13 gives it on Hopper GPUs anyway."""

_FORCED_TF32 = "NVIDIA_TF32_OVERRIDE"


def fix_arithmetic() -> None:
    """Switch off what trades precision for speed in float32 and 16-bit products.

    Call this before CUDA starts. A user's CUBLAS_WORKSPACE_CONFIG is kept.
    """
    os.environ.setdefault(_WORKSPACE, _DEFAULT_WORKSPACE)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def arithmetic_facts(device: torch.device) -> dict[str, str]:
    """Return, by name, what this process computes with.

    Args:
        device: on which this rank computes.
    """
    matmul = torch.backends.cuda.matmul
    tf32 = matmul.allow_tf32 or torch.backends.cudnn.allow_tf32 or os.environ.get(_FORCED_TF32) == "1"
    reduced = matmul.allow_fp16_reduced_precision_reduction or matmul.allow_bf16_reduced_precision_reduction
    return {
        "processor": _processor_name(device),
        "TF32": _on_or_off(tf32),
        "reduced-precision reductions": _on_or_off(reduced),
        _WORKSPACE: os.environ.get(_WORKSPACE, "not set"),
    }


def _processor_name(device: torch.device) -> str:
    """Return the name of a GPU, or that of the CPU with the widest instructions that torch uses on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def cpu_name() -> str:
    """Return the name of this machine's CPU, or of its architecture if Linux does not tell it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def _on_or_off(value: bool) -> str:
    return "on" if value else "off"
