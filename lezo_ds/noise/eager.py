"""The noise operations in plain PyTorch: the reference, and the fallback if no faster backend builds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lezo_ds.noise.backend import OneByOneNoise, Shard
from lezo_ds.noise.draws import dither_words, draw, draw_rows
from lezo_ds.noise.precision import join_master, store
from lezo_ds.zo.distributions import Distribution
from lezo_ds.zo.precision import UpdatePrecision
from lezo_ds.zo.updates import Update

# Elements per chunk: the temporaries of a chunk (about 50 bytes per element) stay near the cache.
CHUNK = 1 << 18


class EagerNoise(OneByOneNoise):
    """`NoiseBackend` on any device, in plain PyTorch."""

    def _draw(
        self,
        distribution: Distribution,
        key: int,
        parameter_id: int,
        start: int,
        count: int,
        device: torch.device,
    ) -> Tensor:
        out = torch.empty(count, dtype=torch.float32, device=device)
        for first, last in _chunks(count, CHUNK):
            out[first:last] = draw(distribution, key, parameter_id, start + first, last - first, device)
        return out

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
        size = CHUNK
        if rows is None:
            theta, outs = theta.view(-1), [out.view(-1) for out in outs]
        else:
            size = max(1, CHUNK // max(1, theta.shape[1]))
        for first, last in _chunks(len(outs[0]), size):
            if rows is None:
                values = theta[first:last]
                z = draw(distribution, key, parameter_id, first, last - first, theta.device)
            else:
                values = theta[rows[first:last]]
                z = draw_rows(distribution, key, parameter_id, rows[first:last], theta.shape[1])
            for out, signed in zip(outs, (scale, -scale), strict=False):
                out[first:last] = values.to(torch.float32) + z * signed

    def _update_all(
        self,
        distribution: Distribution,
        shards: Sequence[Shard],
        steps: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        for values, start, parameter_id, low in shards:
            dithered = precision == "stochastic" and values.dtype != torch.float32
            for first, last in _chunks(values.numel(), CHUNK):
                part = values[first:last]
                part_low = None if low is None else low[first:last]
                where = (parameter_id, start + first, last - first, values.device)
                for key, coefficient, factor in steps:
                    z = draw(distribution, key, *where)
                    master = join_master(part, part_low) * factor - z * coefficient
                    words = dither_words(key, *where) if dithered else None
                    store(master, part, part_low, words)


def _chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Split [0, count) into (first, last) ranges of at most `size`."""
    return ((first, min(first + size, count)) for first in range(0, count, size))
