"""The Triton backend without a GPU: all that Python does to launch its kernels, which then do not run.

What is left out is the part of a launch that is not Python: Triton's launcher in C, and CUDA's driver.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from lezo_ds.noise import Distribution, Shard, Update, UpdatePrecision, Whole
from lezo_ds.noise.cpu import CpuNoise
from lezo_ds.noise.gpu import TritonNoise

_MAX_SHARED_MEMORY = 227 * 1024
_MAX_THREADS = 1024


class _NoLauncher:
    """Stands for the C function that launches a compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:  # noqa: ANN401
        pass

    def __call__(self, *_: object) -> None:
        pass


class _FakeDriver:
    """Stands for Triton's driver of an H100, for which Triton compiles (`GPUDriver` of Triton 3.7)."""

    launcher_cls = _NoLauncher
    utils = SimpleNamespace(
        load_binary=lambda *_: (None, None, 0, 0, _MAX_THREADS),
        get_device_properties=lambda _: {"max_shared_mem": _MAX_SHARED_MEMORY},
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


class FakedTritonNoise(TritonNoise):
    """`TritonNoise` whose launches do nothing, with the results of `CpuNoise`.

    Attributes:
        seconds: CPU time of the launches so far, with the memory and the tables that they need.
    """

    def __init__(self) -> None:
        driver.set_active(_FakeDriver())
        self.seconds = 0.0
        self._results = CpuNoise()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.seconds += time.thread_time() - start

    def _draw(
        self,
        distribution: Distribution,
        key: int,
        parameter_id: int,
        start: int,
        count: int,
        device: torch.device,
    ) -> Tensor:
        return self._results._draw(distribution, key, parameter_id, start, count, device)

    def _perturb_all(
        self, distribution: Distribution, wholes: Sequence[Whole], key: int, scale: float, num_signs: int
    ) -> list[list[Tensor]]:
        with self._timed():
            made = super()._perturb_all(distribution, wholes, key, scale, num_signs)
        with _disable_current_modes():
            for (theta, parameter_id, _), outs in zip(wholes, zip(*made, strict=True), strict=True):
                self._results._perturb(distribution, theta, None, key, parameter_id, scale, outs)
        return made

    def _perturb(
        self,
        distribution: Distribution,
        theta: Tensor,
        rows: Tensor | None,
        key: int,
        parameter_id: int,
        scale: float,
        outs: Sequence[Tensor],
    ) -> None:
        arguments = (distribution, theta, rows, key, parameter_id, scale, outs)
        with self._timed():
            super()._perturb(*arguments)
        with _disable_current_modes():
            self._results._perturb(*arguments)

    def _update_all(
        self,
        distribution: Distribution,
        shards: Sequence[Shard],
        steps: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        with self._timed():
            super()._update_all(distribution, shards, steps, precision)
        with _disable_current_modes():
            self._results._update_all(distribution, shards, steps, precision)
