"""Times the operations of the noise backend against a plain copy and against PyTorch's own noise."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.noise import noise_backend
from lezo_ds.sharding.checkpoint_files import DTYPES
from lezo_ds.tools.benchmark.measure import Row, interleaved, time_columns
from lezo_ds.zo.precision import UpdatePrecision
from lezo_ds.zo.updates import Update

REFERENCE = "torch normal_ and add_"
_CALLS = 4  # timed together, so that the start of a kernel counts little


def measure_noise(dtype: str, num_elements: int, *, rounds: int, threads: int = 1) -> list[Row]:
    """Time each operation in interleaved rounds, on every rank for itself, and return the rows. A collective.

    Args:
        dtype: of the weights: "fp32", "bf16" or "fp16".
        num_elements: number of weights in a call; on a GPU, far more than its cache holds.
        rounds: timed rounds.
        threads: CPU threads of this rank.
    """
    distributed.init_distributed()
    torch.set_num_threads(threads)
    operations = _operations(dtype, num_elements)
    actions = {name: partial(_repeat, operation) for name, (_, operation) in operations.items()}
    for action in actions.values():
        action()
    calls = interleaved(actions, rounds)
    times = {name: [seconds / _CALLS for seconds in found] for name, found in calls.items()}
    common = {"measured": "noise", "dtype": dtype, "elements": num_elements, "reference": REFERENCE}
    common |= {"ranks": distributed.world_size(), "threads": threads}
    rows = []
    for name, (element_bytes, _) in operations.items():
        speed = element_bytes * num_elements / statistics.median(times[name])
        measured = time_columns(times[name], times[REFERENCE]) | {"bytes_per_second": speed}
        rows.append(common | {"variant": name} | measured)
    return rows


def _repeat(operation: Callable[[], object]) -> None:
    for _ in range(_CALLS):
        operation()


def _operations(dtype: str, num_elements: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return by name: the bytes per element that an operation must read and write, and the operation."""
    device = distributed.device()
    noise = noise_backend(device)
    theta = noise.normal(1, 0, 0, num_elements, device).to(DTYPES[dtype])
    other = torch.empty_like(theta)
    low = torch.zeros(num_elements, dtype=torch.int16, device=device)
    generator = torch.Generator(device).manual_seed(1)
    size = theta.element_size()

    def perturb(*scales: float) -> object:
        return noise.perturb(theta, key=1, parameter_id=2, scales=scales)

    def update(num_steps: int, precision: UpdatePrecision, low: Tensor | None = None) -> None:
        steps: Sequence[Update] = [Update(key, 1e-3) for key in range(num_steps)]
        noise.update_(theta, 0, parameter_id=2, steps=steps, precision=precision, low=low)

    operations: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2 * size, lambda: other.copy_(theta)),
        REFERENCE: (4 * size, lambda: theta.add_(other.normal_(generator=generator), alpha=1e-9)),
        "normal, fp32": (4, lambda: noise.normal(1, 2, 0, num_elements, device)),
        "perturb": (2 * size, lambda: perturb(1e-3)),
        "perturb_pair": (3 * size, lambda: perturb(1e-3, -1e-3)),
        "update, nearest": (2 * size, lambda: update(1, "nearest")),
        "update of 16 steps, nearest": (2 * size, lambda: update(16, "nearest")),
    }
    if size == 2:
        operations |= {
            "update, stochastic": (2 * size, lambda: update(1, "stochastic")),
            "update, fp32_master": (8, lambda: update(1, "fp32_master", low)),
        }
    return operations
