"""The noise operations for CUDA devices, with Triton."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.backend import NoiseBackend, NoiseMode, SeedAndCoefficient
from lezo_ds.noise.precision import UpdatePrecision

logger = logging.getLogger(__name__)

Trial = Callable[["TritonNoise"], object]
"""An operation on scratch memory, by the backend that it is given."""

_PRECISIONS: dict[UpdatePrecision, int] = {
    "nearest": kernels.NEAREST.value,
    "stochastic": kernels.STOCHASTIC.value,
    "fp32_master": kernels.MASTER.value,
}


@dataclass(frozen=True)
class Tile:
    """How much of a tensor one program of a kernel handles; it changes no bit.

    Attributes:
        num_blocks: Philox blocks (4 elements each), a power of two.
        num_warps: of 32 threads each that share them.
    """

    num_blocks: int
    num_warps: int

    def count(self, start: int, num_elements: int) -> int:
        """Return how many tiles cover elements [start, start + num_elements)."""
        return -(-(start % 4 + num_elements) // (4 * self.num_blocks)) if num_elements else 0


SMALL_TILE = Tile(256, 4)
"""For rows, and for what is called rarely."""

TILES = (SMALL_TILE, Tile(128, 4), Tile(512, 4), Tile(512, 8), Tile(1024, 8))
"""From which the fastest is chosen."""

TUNED_ELEMENTS = 1 << 16
"""Operations on fewer weights are not worth tuning."""

TRIAL_ELEMENTS = 1 << 25
_TRIALS = 20


class TritonNoise(NoiseBackend):
    """`NoiseBackend` on CUDA devices.

    Rows out of range are not caught. The kernels that touch every weight are timed on scratch memory at first
    use, with each of `TILES`.

    Args:
        mode: "exact" has the bits of the other backends, "fast" those of this model of GPU and version of
            Triton (see lezo_ds.noise.triton_kernels).
        tile: to use in the place of the fastest.
    """

    def __init__(self, mode: NoiseMode = "exact", tile: Tile | None = None) -> None:
        self._mode: NoiseMode = mode
        self._tile = tile
        self._fastest: dict[tuple[object, ...], Tile] = {}

    def _normal(self, seed: int, parameter_id: int, start: int, count: int, device: torch.device) -> Tensor:
        out = torch.empty(count, dtype=torch.float32, device=device)
        tile = self._tile or SMALL_TILE
        arguments = (out, seed, parameter_id, start, count)
        programs = tile.count(start, count)
        self._launch(kernels.normal_kernel, tile, programs, *arguments, aligned=start % 4 == 0)
        return out

    def _perturb(
        self,
        theta: Tensor,
        rows: Tensor | None,
        seed: int,
        parameter_id: int,
        scale: float,
        outs: Sequence[Tensor],
    ) -> None:
        plus, minus = outs[0], outs[1] if len(outs) > 1 else None
        if rows is None:
            num_rows, width = 1, theta.numel()
            tile = self._perturb_tile(theta, plus.dtype, num_signs=len(outs))
        else:
            num_rows, width = len(rows), theta.shape[1]
            tile = self._tile or SMALL_TILE
        aligned = rows is None or width % 4 == 0
        tiles_per_row = tile.count(0 if aligned else 3, width)
        arguments = (theta, rows, plus, minus, seed, parameter_id, scale, width, tiles_per_row)
        programs = num_rows * tiles_per_row
        self._launch(kernels.perturb_kernel, tile, programs, *arguments, aligned=aligned)

    def _update(
        self,
        shard: Tensor,
        start: int,
        parameter_id: int,
        steps: Sequence[SeedAndCoefficient],
        precision: UpdatePrecision,
        low: Tensor | None,
        sums: Tensor | None,
    ) -> None:
        tile = self._update_tile(shard, precision)
        programs = tile.count(start, shard.numel())
        constants: dict[str, Any] = {
            "precision": _precision_code(shard, precision),
            "aligned": start % 4 == 0,
        }
        if len(steps) == 1:
            seed, coefficient = steps[0]
            one = (shard, low, sums, seed, parameter_id, coefficient, start, shard.numel())
            self._launch(kernels.update_kernel, tile, programs, *one, **constants)
            return
        seeds = torch.tensor([seed for seed, _ in steps], dtype=torch.uint64, device=shard.device)
        coefficients = torch.tensor([c for _, c in steps], dtype=torch.float32, device=shard.device)
        many = (shard, low, seeds, coefficients, len(steps), parameter_id, start, shard.numel())
        self._launch(kernels.update_many_kernel, tile, programs, *many, **constants)

    def _perturb_tile(self, theta: Tensor, out_dtype: torch.dtype, *, num_signs: int) -> Tile:
        def prepare() -> Trial:
            scratch = torch.zeros(TRIAL_ELEMENTS, dtype=theta.dtype, device=theta.device)
            return lambda noise: noise._perturbed(scratch, None, 0, 0, 1e-3, out_dtype, num_signs)

        return self._fastest_tile(("perturb", theta.dtype, out_dtype, num_signs), theta, prepare)

    def _update_tile(self, shard: Tensor, precision: UpdatePrecision) -> Tile:
        def prepare() -> Trial:
            scratch = torch.zeros(TRIAL_ELEMENTS, dtype=shard.dtype, device=shard.device)
            has_low = precision == "fp32_master" and shard.dtype != torch.float32
            low = torch.zeros_like(scratch, dtype=torch.int16) if has_low else None
            sums = torch.zeros(2, dtype=torch.int64, device=shard.device)
            return lambda noise: noise.update_(scratch, 0, 0, 0, 1e-3, precision, low, sums)

        return self._fastest_tile(("update", shard.dtype, precision), shard, prepare)

    def _fastest_tile(self, key: tuple[object, ...], weights: Tensor, prepare: Callable[[], Trial]) -> Tile:
        """Return the tile with which an operation, known by its key, is fastest on many weights."""
        if self._tile is not None:
            return self._tile
        if weights.numel() < TUNED_ELEMENTS or not is_timed(weights.device):
            return SMALL_TILE
        if key not in self._fastest:
            trial = prepare()
            seconds = {tile: _seconds(trial, TritonNoise(self._mode, tile), weights.device) for tile in TILES}
            self._fastest[key] = min(seconds, key=lambda tile: seconds[tile])
            logger.info("the noise kernel of %s is tuned: %s", key, self._fastest[key])
        return self._fastest[key]

    def _launch(
        self,
        kernel: Any,  # noqa: ANN401
        tile: Tile,
        num_programs: int,
        first: Tensor,
        *arguments: object,
        **constants: object,
    ) -> None:
        """Run `num_programs` programs of a kernel on the first tensor's device."""
        if num_programs == 0:
            return
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            kernel[(num_programs,)](
                first,
                *arguments,
                **constants,
                fast=self._mode == "fast",
                num_blocks=tile.num_blocks,
                num_warps=tile.num_warps,
                enable_fp_fusion=False,
            )


def is_timed(device: torch.device) -> bool:
    """Whether time on a device says which tile is best: not in Triton's interpreter."""
    return device.type == "cuda"


def _seconds(trial: Trial, noise: TritonNoise, device: torch.device) -> float:
    """Return how long a trial takes, compiled before."""
    trial(noise)
    _wait(device)
    start = time.perf_counter()
    for _ in range(_TRIALS):
        trial(noise)
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _precision_code(shard: Tensor, precision: UpdatePrecision) -> int:
    """Return the kernels' code; fp32 storage is plain in every mode."""
    return _PRECISIONS["nearest" if shard.dtype == torch.float32 else precision]
