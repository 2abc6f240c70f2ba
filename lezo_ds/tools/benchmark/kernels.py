"""Times the operations of the noise backend against a plain copy and against PyTorch's own noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.noise import NoiseBackend, Update, UpdatePrecision, noise_backend
from lezo_ds.sharding.checkpoint_files import DTYPES
from lezo_ds.tools.benchmark.results import Elapsed, Kernels, KernelTiming
from lezo_ds.tools.benchmark.steps import time_once

_KEY, _PARAMETER, _SCALE = 1, 2, 1e-3
_CALLS = 4  # timed together, so that starting them counts little
REPLAYED_STEPS = 16


def measure_kernels(dtype: str, num_elements: int, rounds: int, threads: int) -> Kernels:
    """Time each operation, in interleaved rounds, on a rank of its own. A collective.

    Args:
        dtype: of the weights, "fp32", "bf16" or "fp16".
        num_elements: of each call; on a GPU far more than its cache holds.
        rounds: timed calls of each operation.
        threads: of a call on a CPU.
    """
    distributed.init_distributed()
    torch.set_num_threads(threads)
    operations = _operations(dtype, num_elements)
    for _, _, operation in operations:
        operation()
    elapsed: list[list[Elapsed]] = [[] for _ in operations]
    for _ in range(rounds):
        for times, (_, _, operation) in zip(elapsed, operations, strict=True):
            total = time_once(partial(_repeat, operation))
            times.append(Elapsed(total.seconds / _CALLS, total.cpu_seconds / _CALLS))
    timings = tuple(
        KernelTiming(name, tuple(times), num_bytes * num_elements)
        for times, (name, num_bytes, _) in zip(elapsed, operations, strict=True)
    )
    return Kernels(dtype, num_elements, threads, timings)


def _repeat(operation: Callable[[], object]) -> None:
    for _ in range(_CALLS):
        operation()


def _operations(dtype: str, num_elements: int) -> list[tuple[str, int, Callable[[], object]]]:
    """Return (name, bytes an element that it must read and write, operation)."""
    device = distributed.device()
    theta = noise_backend(device).normal(_KEY, 0, 0, num_elements, device).to(DTYPES[dtype])
    other = torch.empty_like(theta)
    generator = torch.Generator(device).manual_seed(_KEY)
    size = theta.element_size()

    def torch_noise() -> object:
        return theta.add_(other.normal_(generator=generator), alpha=1e-9)

    references = [
        ("copy", 2 * size, lambda: other.copy_(theta)),
        ("torch normal_ and add_", 4 * size, torch_noise),
    ]
    return [*references, *_noise_operations(noise_backend(device), theta)]


def _noise_operations(noise: NoiseBackend, theta: Tensor) -> list[tuple[str, int, Callable[[], object]]]:
    """Return what `_operations` does, of one backend on weights that it changes."""
    num_elements, size, device = theta.numel(), theta.element_size(), theta.device
    low = torch.zeros(num_elements, dtype=torch.int16, device=device)
    step = Update(_KEY, _SCALE)
    steps = [Update(key, _SCALE) for key in range(REPLAYED_STEPS)]

    def update(precision: UpdatePrecision, low: Tensor | None = None) -> Callable[[], object]:
        return lambda: noise.update_(theta, 0, _PARAMETER, [step], precision, low)

    def perturb(*scales: float) -> Callable[[], object]:
        return lambda: noise.perturb(theta, _KEY, _PARAMETER, scales)

    made: list[tuple[str, int, Callable[[], object]]] = [
        ("normal, fp32", 4, lambda: noise.normal(_KEY, _PARAMETER, 0, num_elements, device)),
        ("perturb", 2 * size, perturb(_SCALE)),
        ("perturb_pair", 3 * size, perturb(_SCALE, -_SCALE)),
        ("update, nearest", 2 * size, update("nearest")),
    ]
    if size == 2:
        made += [
            ("update, stochastic", 2 * size, update("stochastic")),
            ("update, fp32_master", 8, update("fp32_master", low)),
        ]
    many = partial(noise.update_, theta, 0, _PARAMETER, steps, "nearest")
    return [*made, (f"update of {REPLAYED_STEPS} steps, nearest", 2 * size, many)]
