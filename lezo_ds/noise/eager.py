"""The noise operations in plain PyTorch: the reference, and the fallback where nothing faster builds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lezo_ds.noise import gaussian
from lezo_ds.noise.backend import SeedAndCoefficient, check_perturb, check_range, check_update
from lezo_ds.noise.bit_sum import bit_sum
from lezo_ds.noise.precision import UpdatePrecision, join_master, store

# Elements handled at once: a chunk's temporaries (about 50 bytes an element) stay near the cache.
CHUNK = 1 << 18


class EagerNoise:
    """`NoiseBackend` on any device, in plain PyTorch."""

    def normal(self, seed: int, parameter_id: int, start: int, count: int, device: torch.device) -> Tensor:
        """See `NoiseBackend.normal`."""
        check_range(seed, parameter_id, start, count)
        out = torch.empty(count, dtype=torch.float32, device=device)
        for first, last in _chunks(count):
            out[first:last] = gaussian.normal(seed, parameter_id, start + first, last - first, device)
        return out

    def perturb(
        self, theta: Tensor, seed: int, parameter_id: int, scale: float, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `NoiseBackend.perturb`."""
        return _perturb(theta, seed, parameter_id, (scale,), out_dtype)[0]

    def perturb_pair(
        self, theta: Tensor, seed: int, parameter_id: int, scale: float, out_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `NoiseBackend.perturb_pair`."""
        plus, minus = _perturb(theta, seed, parameter_id, (scale, -scale), out_dtype)
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
        """See `NoiseBackend.perturb_rows`."""
        return _perturb_rows(theta, rows, seed, parameter_id, (scale,), out_dtype)[0]

    def perturb_rows_pair(
        self,
        theta: Tensor,
        rows: Tensor,
        seed: int,
        parameter_id: int,
        scale: float,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `NoiseBackend.perturb_rows_pair`."""
        plus, minus = _perturb_rows(theta, rows, seed, parameter_id, (scale, -scale), out_dtype)
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
        if sums is not None:
            sums[0] += bit_sum(shard, low)
        self.update_many_(shard, start, parameter_id, [(seed, coefficient)], precision, low)
        if sums is not None:
            sums[1] += bit_sum(shard, low)

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
        dithered = precision == "stochastic" and shard.dtype != torch.float32
        for first, last in _chunks(shard.numel()):
            part = shard[first:last]
            part_low = None if low is None else low[first:last]
            where = (parameter_id, start + first, last - first, shard.device)
            for seed, coefficient in steps:
                values = join_master(part, part_low) - gaussian.normal(seed, *where) * coefficient
                words = gaussian.dither_words(seed, *where) if dithered else None
                store(values, part, part_low, precision, words)


def _perturb(
    theta: Tensor, seed: int, parameter_id: int, scales: tuple[float, ...], out_dtype: torch.dtype | None
) -> list[Tensor]:
    """Return theta + scale z for each scale."""
    out_dtype = out_dtype or theta.dtype
    check_perturb(theta, None, out_dtype)
    check_range(seed, parameter_id, 0, theta.numel())
    flat = theta.reshape(-1)
    outs = [torch.empty(theta.shape, dtype=out_dtype, device=theta.device) for _ in scales]
    for first, last in _chunks(flat.numel()):
        z = gaussian.normal(seed, parameter_id, first, last - first, theta.device)
        values = flat[first:last].to(torch.float32)
        for out, scale in zip(outs, scales, strict=True):
            out.view(-1)[first:last] = values + z * scale
    return outs


def _perturb_rows(
    theta: Tensor,
    rows: Tensor,
    seed: int,
    parameter_id: int,
    scales: tuple[float, ...],
    out_dtype: torch.dtype | None,
) -> list[Tensor]:
    """Return the given rows of theta + scale z for each scale."""
    out_dtype = out_dtype or theta.dtype
    check_perturb(theta, rows, out_dtype)
    check_range(seed, parameter_id, 0, theta.numel())
    width = theta.shape[1]
    outs = [torch.empty(len(rows), width, dtype=out_dtype, device=theta.device) for _ in scales]
    for first, last in _chunks(len(rows), max(1, CHUNK // max(1, width))):
        z = _normal_rows(rows[first:last], width, seed, parameter_id)
        values = theta[rows[first:last]].to(torch.float32)
        for out, scale in zip(outs, scales, strict=True):
            out[first:last] = values + z * scale
    return outs


def _normal_rows(rows: Tensor, width: int, seed: int, parameter_id: int) -> Tensor:
    """Return z of the given rows of a parameter of that width: fp32 [len(rows), width]."""
    starts = (rows * width)[:, None]
    num_blocks = (width + 6) // 4  # as many as a row can touch, wherever in a block it starts
    blocks = starts // 4 + torch.arange(num_blocks, device=rows.device)
    z = gaussian.normals_of_blocks(seed, parameter_id, blocks).view(len(rows), -1)
    return z.gather(1, starts % 4 + torch.arange(width, device=rows.device))


def _chunks(count: int, size: int = CHUNK) -> Iterator[tuple[int, int]]:
    """Split [0, count) into (first, last) ranges of at most `size`."""
    return ((first, min(first + size, count)) for first in range(0, count, size))
