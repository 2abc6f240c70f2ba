"""The noise operations for CUDA devices, with Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.backend import SeedAndCoefficient, check_perturb, check_range, check_update
from lezo_ds.noise.precision import UpdatePrecision

# Philox blocks (4 elements each) a program handles: 8 elements a thread with 4 warps.
BLOCKS_PER_TILE = 256

_PRECISIONS: dict[UpdatePrecision, int] = {
    "nearest": kernels.NEAREST.value,
    "stochastic": kernels.STOCHASTIC.value,
    "fp32_master": kernels.MASTER.value,
}


class TritonNoise:
    """`NoiseBackend` on CUDA devices."""

    def normal(self, seed: int, parameter_id: int, start: int, count: int, device: torch.device) -> Tensor:
        """See `NoiseBackend.normal`."""
        check_range(seed, parameter_id, start, count)
        out = torch.empty(count, dtype=torch.float32, device=device)
        aligned = start % 4 == 0
        tiles = _num_tiles(start, count)
        _launch(kernels.normal_kernel, tiles, out, seed, parameter_id, start, count, aligned=aligned)
        return out

    def perturb(
        self, theta: Tensor, seed: int, parameter_id: int, scale: float, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `NoiseBackend.perturb`."""
        return _perturb(theta, None, seed, parameter_id, scale, out_dtype, pair=False)[0]

    def perturb_pair(
        self, theta: Tensor, seed: int, parameter_id: int, scale: float, out_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `NoiseBackend.perturb_pair`."""
        plus, minus = _perturb(theta, None, seed, parameter_id, scale, out_dtype, pair=True)
        return plus, minus

    def perturb_rows(
        self,
        theta: Tensor,
        rows: Tensor,
        seed: int,
        parameter_id: int,
        scale: float,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """See `NoiseBackend.perturb_rows`. Rows out of range are not caught."""
        return _perturb(theta, rows, seed, parameter_id, scale, out_dtype, pair=False)[0]

    def perturb_rows_pair(
        self,
        theta: Tensor,
        rows: Tensor,
        seed: int,
        parameter_id: int,
        scale: float,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `NoiseBackend.perturb_rows_pair`. Rows out of range are not caught."""
        plus, minus = _perturb(theta, rows, seed, parameter_id, scale, out_dtype, pair=True)
        return plus, minus

    def update_(
        self,
        shard: Tensor,
        start: int,
        seed: int,
        parameter_id: int,
        coefficient: float,
        precision: UpdatePrecision,
        low: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> None:
        """See `NoiseBackend.update_`."""
        check_update(shard, precision, low)
        check_range(seed, parameter_id, start, shard.numel())
        _launch(
            kernels.update_kernel,
            _num_tiles(start, shard.numel()),
            shard,
            low,
            sums,
            seed,
            parameter_id,
            coefficient,
            start,
            shard.numel(),
            precision=_precision_code(shard, precision),
            aligned=start % 4 == 0,
        )

    def update_many_(
        self,
        shard: Tensor,
        start: int,
        parameter_id: int,
        steps: Sequence[SeedAndCoefficient],
        precision: UpdatePrecision,
        low: Tensor | None = None,
    ) -> None:
        """See `NoiseBackend.update_many_`."""
        check_update(shard, precision, low)
        for seed, _ in steps:
            check_range(seed, parameter_id, start, shard.numel())
        seeds = torch.tensor([seed for seed, _ in steps], dtype=torch.uint64, device=shard.device)
        coefficients = torch.tensor([c for _, c in steps], dtype=torch.float32, device=shard.device)
        _launch(
            kernels.update_many_kernel,
            _num_tiles(start, shard.numel()),
            shard,
            low,
            seeds,
            coefficients,
            len(steps),
            parameter_id,
            start,
            shard.numel(),
            precision=_precision_code(shard, precision),
            aligned=start % 4 == 0,
        )


def _perturb(
    theta: Tensor,
    rows: Tensor | None,
    seed: int,
    parameter_id: int,
    scale: float,
    out_dtype: torch.dtype | None,
    *,
    pair: bool,
) -> list[Tensor]:
    """Return [theta + scale z], and theta - scale z if `pair`, of the given rows or (None) of all."""
    out_dtype = out_dtype or theta.dtype
    check_perturb(theta, rows, out_dtype)
    check_range(seed, parameter_id, 0, theta.numel())
    theta = theta.contiguous()
    if rows is None:
        shape, num_rows, width = theta.shape, 1, theta.numel()
    else:
        rows = rows.contiguous()
        shape, num_rows, width = torch.Size((len(rows), theta.shape[1])), len(rows), theta.shape[1]
    outs = [torch.empty(shape, dtype=out_dtype, device=theta.device) for _ in range(2 if pair else 1)]
    aligned = rows is None or width % 4 == 0
    tiles_per_row = _num_tiles(0 if aligned else 3, width)
    _launch(
        kernels.perturb_kernel,
        num_rows * tiles_per_row,
        theta,
        rows,
        outs[0],
        outs[1] if pair else None,
        seed,
        parameter_id,
        scale,
        width,
        tiles_per_row,
        aligned=aligned,
    )
    return outs


def _num_tiles(start: int, count: int) -> int:
    """Return how many tiles cover elements [start, start + count)."""
    return -(-(start % 4 + count) // (4 * BLOCKS_PER_TILE)) if count else 0


def _precision_code(shard: Tensor, precision: UpdatePrecision) -> int:
    """Return the kernels' code; fp32 storage is plain in every mode."""
    return _PRECISIONS["nearest" if shard.dtype == torch.float32 else precision]


def _launch(kernel: Any, num_programs: int, first: Tensor, *arguments: object, **constants: object) -> None:  # noqa: ANN401
    """Run `num_programs` programs of a kernel on the first tensor's device."""
    if num_programs == 0:
        return
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        kernel[(num_programs,)](
            first, *arguments, **constants, num_blocks=BLOCKS_PER_TILE, enable_fp_fusion=False
        )
