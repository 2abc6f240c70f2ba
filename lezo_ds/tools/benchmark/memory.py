"""Peak memory of a piece of work, on a GPU or, on Linux, of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"


@dataclass
class Peak:
    """What a piece of work used at most.

    Attributes:
        num_bytes: above what was in use before; None where it cannot be known.
    """

    num_bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the peak memory of the block: of the device's allocator, or resident on a CPU."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        torch.cuda.synchronize()
        peak.num_bytes = torch.cuda.max_memory_allocated() - before
    elif _CLEAR.exists():
        _return_freed_memory()
        _CLEAR.write_text(_FORGET_PEAK)
        before = _resident("VmRSS")
        yield peak
        peak.num_bytes = max(0, _resident("VmHWM") - before)
    else:
        yield peak


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _return_freed_memory() -> None:
    # Else what earlier work has freed stays resident, and hides what this work needs (glibc only).
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
