"""Times the operations of the noise backend against a plain copy and against PyTorch's own noise."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import get_args

import torch

from lezo_ds import distributed
from lezo_ds.noise import noise_backend
from lezo_ds.sharding.checkpoint_files import DTYPES
from lezo_ds.tools.benchmark.measure import Row, interleaved, time_columns
from lezo_ds.zo.distributions import Distribution
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
    theta = noise.draw(1, 0, 0, num_elements, device).to(DTYPES[dtype])
    other = torch.empty_like(theta)
    low = torch.zeros(num_elements, dtype=torch.int16, device=device)
    generator = torch.Generator(device).manual_seed(1)
    size = theta.element_size()

    def draw(distribution: Distribution) -> object:
        return noise.draw(1, 2, 0, num_elements, device, distribution)

    def perturb(distribution: Distribution, *scales: float) -> object:
        return noise.perturb(theta, 1, 2, scales, distribution=distribution)

    def update(distribution: Distribution, precision: UpdatePrecision, num_steps: int = 1) -> None:
        steps: Sequence[Update] = [Update(key, 1e-3) for key in range(num_steps)]
        low_bits = low if precision == "fp32_master" else None
        noise.update_(theta, 0, 2, steps, precision, low_bits, distribution)

    operations: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2 * size, lambda: other.copy_(theta)),
        "copy to new memory": (2 * size, theta.clone),  # as a perturbation's results are
        REFERENCE: (4 * size, lambda: theta.add_(other.normal_(generator=generator), alpha=1e-9)),
    }
    for distribution in get_args(Distribution):
        suffix = "" if distribution == "normal" else f", {distribution}"
        operations |= {
            f"{distribution}, fp32": (4, partial(draw, distribution)),
            f"perturb{suffix}": (2 * size, partial(perturb, distribution, 1e-3)),
            f"perturb_pair{suffix}": (3 * size, partial(perturb, distribution, 1e-3, -1e-3)),
            f"update, nearest{suffix}": (2 * size, partial(update, distribution, "nearest")),
            f"update of 16 steps, nearest{suffix}": (2 * size, partial(update, distribution, "nearest", 16)),
        }
        if size == 2:
            operations |= {
                f"update, stochastic{suffix}": (2 * size, partial(update, distribution, "stochastic")),
                f"update, fp32_master{suffix}": (8, partial(update, distribution, "fp32_master")),
            }
    return operations
