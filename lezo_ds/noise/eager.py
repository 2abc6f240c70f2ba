"""The noise operations in plain PyTorch: the reference, and the fallback where no faster backend builds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lezo_ds.noise.backend import NoiseBackend, Shard, Weight
from lezo_ds.noise.draws import dither_words, draw, draw_rows
from lezo_ds.noise.precision import join_master, store
from lezo_ds.zo.updates import Distribution, Update, UpdatePrecision

CHUNK = 1 << 18  # elements; their temporaries (about 50 bytes an element) stay near the cache


class EagerNoise(NoiseBackend):
    """`NoiseBackend` on any device."""

    def draw(
        self,
        key: int,
        parameter_id: int,
        start: int,
        count: int,
        device: torch.device,
        distribution: Distribution = "normal",
    ) -> Tensor:
        out = torch.empty(count, device=device)
        for first, last in _chunks(count, CHUNK):
            out[first:last] = draw(distribution, key, parameter_id, start + first, last - first, device)
        return out

    def _perturb(
        self, weights: Sequence[Weight], key: int, scale: float, num_signs: int, distribution: Distribution
    ) -> list[list[Tensor]]:
        copies = []
        for theta, parameter_id, out_dtype, rows in weights:
            source = theta.view(-1) if rows is None else theta
            count, chunk = (len(source), CHUNK) if rows is None else (len(rows), _rows_at_once(theta))
            shape, device = (count, *source.shape[1:]), theta.device
            outs = [torch.empty(shape, dtype=out_dtype, device=device) for _ in range(num_signs)]
            for first, last in _chunks(count, chunk):
                if rows is None:
                    values = source[first:last]
                    z = draw(distribution, key, parameter_id, first, last - first, device)
                else:
                    values = source[rows[first:last]]
                    z = draw_rows(distribution, key, parameter_id, rows[first:last], theta.shape[1])
                for out, signed in zip(outs, (scale, -scale), strict=False):
                    out[first:last] = values.to(torch.float32) + z * signed
            copies.append([out.view_as(theta) if rows is None else out for out in outs])
        return copies

    def update_(
        self,
        shards: Sequence[Shard],
        updates: Sequence[Update],
        precision: UpdatePrecision,
        distribution: Distribution = "normal",
    ) -> None:
        for values, start, parameter_id, low in shards:
            dithered = precision == "stochastic" and values.dtype != torch.float32
            for first, last in _chunks(values.numel(), CHUNK):
                part = values[first:last]
                part_low = None if low is None else low[first:last]
                elements = (parameter_id, start + first, last - first, values.device)
                for key, coefficient, factor in updates:
                    z = draw(distribution, key, *elements)
                    master = join_master(part, part_low) * factor - z * coefficient
                    store(master, part, part_low, dither_words(key, *elements) if dithered else None)


def _rows_at_once(theta: Tensor) -> int:
    return max(1, CHUNK // max(1, theta.shape[1]))


def _chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Split [0, count) into (first, last) ranges of at most `size`."""
    return ((first, min(first + size, count)) for first in range(0, count, size))
