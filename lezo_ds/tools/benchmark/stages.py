"""Where the time and the memory of a step go."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lezo_ds import distributed
from lezo_ds.tools.benchmark.table import STAGES

StagedMethod = tuple[Any, str, str]
"""An object or class, the name of a method, and the one of STAGES that its calls belong to."""

_LABEL = "stage: "
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def synchronize() -> None:
    """Wait until the GPU has done all its work; does nothing on a CPU."""
    if _on_gpu():
        torch.cuda.synchronize()


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Label what runs in the block as one of STAGES, for `stage_seconds`."""
    is_profiled = torch.autograd.profiler._is_profiler_enabled
    # A GPU runs behind the host. Waiting at both ends makes the host's time of a stage that of its GPU work.
    if is_profiled:
        synchronize()
    with record_function(_LABEL + name):
        yield
        if is_profiled:
            synchronize()


def stage_seconds(step: Callable[[], object], methods: Iterable[StagedMethod] = ()) -> dict[str, float]:
    """Run a step under torch's profiler and return the columns of STAGES.

    The time of an inner stage does not count in the outer one. The profiler and, on a GPU, waiting at both
    ends of each stage make this step slower than others.

    Args:
        step: its blocks `stage` are counted.
        methods: their calls are counted, too.
    """
    with ExitStack() as stack:
        for owner, method, name in methods:
            stack.enter_context(patch.object(owner, method, _labeled(getattr(owner, method), name)))
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler's library writes to the terminal
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            distributed.barrier()  # ranks start their profilers at different speeds
            with stage("other"):
                step()
    seconds = {f"{name}_seconds": 0.0 for name in STAGES}
    for event in profiler.events() or ():
        if not event.name.startswith(_LABEL):
            continue
        seconds[_column(event)] += event.cpu_time_total / 1e6
        outer = event.cpu_parent
        while outer is not None and not outer.name.startswith(_LABEL):
            outer = outer.cpu_parent
        if outer is not None:
            seconds[_column(outer)] -= event.cpu_time_total / 1e6
    return seconds


def _column(event: Any) -> str:  # noqa: ANN401
    return f"{event.name.removeprefix(_LABEL)}_seconds"


def _labeled(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with stage(name):
            return function(*args, **kwargs)

    return run


def peak_bytes(step: Callable[[], object]) -> int | None:
    """Run a step and return its peak memory above what was in use before; None if it cannot be known.

    On a GPU this is memory of torch's allocator, on Linux without a GPU resident memory of this process.
    """
    if _on_gpu():
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        synchronize()
        return torch.cuda.max_memory_allocated() - before
    if not _CLEAR_REFS.exists():
        step()
        return None
    # glibc keeps freed memory resident, which would hide what the step needs.
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR_REFS.write_text("5")  # resets VmHWM; see proc(5)
    before = _resident("VmRSS")
    step()
    return max(0, _resident("VmHWM") - before)


def _on_gpu() -> bool:
    return distributed.device().type == "cuda"


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
