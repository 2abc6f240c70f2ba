"""Triton's kernels without a GPU: all that Python does to launch them. They do not run.

What is left out is the part of a launch that is not Python: Triton's launcher in C, and CUDA's driver.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from lezo_ds.forward import perturbed_modules, perturbed_norm
from lezo_ds.forward.replaced_call import call_with_copies
from lezo_ds.noise.cpu import CpuNoise
from lezo_ds.noise.gpu import TritonNoise
from lezo_ds.noise.launch import Launch

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
        # With None for a module, Triton would load it again at each launch.
        load_binary=lambda *_: ("module", "function", 0, 0, _MAX_THREADS),
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
        launch_seconds: CPU time of the launches so far, and of those of norms.
        seconds: the same with all else that the backend does: tables, memory for copies, and their views.
    """

    def __init__(self) -> None:
        driver.set_active(_FakeDriver())
        self.seconds = 0.0
        self.launch_seconds = 0.0
        self._results = CpuNoise()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        run = Launch.run

        def timed_run(launch: Launch, *arguments: Any) -> None:  # noqa: ANN401
            start = time.thread_time()
            run(launch, *arguments)
            self.launch_seconds += time.thread_time() - start

        with patch.object(Launch, "run", timed_run):
            start = time.thread_time()
            yield
            self.seconds += time.thread_time() - start

    def _draw(self, *arguments: Any) -> Tensor:  # noqa: ANN401
        return self._results._draw(*arguments)

    def _perturb_all(self, *arguments: Any) -> list[list[Tensor]]:  # noqa: ANN401
        with self._timed():
            made = super()._perturb_all(*arguments)
        with _disable_current_modes():
            for copies, results in zip(made, self._results._perturb_all(*arguments), strict=True):
                for copy, result in zip(copies, results, strict=True):
                    copy.copy_(result)
        return made

    def _perturb_rows(self, *arguments: Any) -> None:  # noqa: ANN401
        with self._timed():
            super()._perturb_rows(*arguments)
        with _disable_current_modes():
            self._results._perturb_rows(*arguments)

    def _update_all(self, *arguments: Any) -> None:  # noqa: ANN401
        with self._timed():
            super()._update_all(*arguments)
        with _disable_current_modes():
            self._results._update_all(*arguments)

    @contextmanager
    def with_norms(self) -> Iterator[None]:
        """Launch the kernel of perturbed LayerNorms, too, with results of torch on the CPU."""
        with (
            patch.object(perturbed_norm, "is_on_gpu", lambda _: True),
            patch.object(perturbed_modules, "norm_at_probes", self._norm_at_probes),
        ):
            yield

    def _norm_at_probes(
        self, module: nn.Module, copies: Mapping[str, Sequence[Tensor]], batch: Tensor, num_copies: int
    ) -> Tensor:
        with self._timed():
            output = perturbed_norm.norm_at_probes(module, copies, batch, num_copies)
        with _disable_current_modes():
            for probe, (result, share) in enumerate(
                zip(output.chunk(num_copies), batch.chunk(num_copies), strict=True)
            ):
                of_probe = {name: vectors[probe] for name, vectors in copies.items()}
                forward = partial(nn.LayerNorm.forward, cast(nn.LayerNorm, module))
                result.copy_(call_with_copies(module, forward, of_probe, [share.float()], {}))
        return output
