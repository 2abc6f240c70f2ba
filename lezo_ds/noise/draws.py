"""The noise z(key, parameter, element) and the dither: the eager reference of every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lezo_ds.noise import gaussian, rademacher
from lezo_ds.noise.philox import DITHER_STREAM, words_of_blocks
from lezo_ds.zo.distributions import Distribution


class _Drawn(NamedTuple):
    """How the elements of a distribution come from blocks of Philox words.

    Attributes:
        per_block: number of elements of a block.
        of_blocks: (key, parameter id, block indices of any shape) -> [*shape, per_block].
    """

    per_block: int
    of_blocks: Callable[[int, int, Tensor], Tensor]


def _dither_of_blocks(key: int, parameter_id: int, blocks: Tensor) -> Tensor:
    return torch.stack(words_of_blocks(key, parameter_id, blocks, DITHER_STREAM), -1)


_DISTRIBUTIONS: dict[Distribution, _Drawn] = {
    "normal": _Drawn(gaussian.ELEMENTS_PER_BLOCK, gaussian.normals_of_blocks),
    "rademacher": _Drawn(rademacher.ELEMENTS_PER_BLOCK, rademacher.signs_of_blocks),
}
_DITHER = _Drawn(4, _dither_of_blocks)


def draw(
    distribution: Distribution, key: int, parameter_id: int, start: int, count: int, device: torch.device
) -> Tensor:
    """Return z of elements [start, start + count) of one parameter: fp32 [count]."""
    return _draw(_DISTRIBUTIONS[distribution], key, parameter_id, start, count, device)


def draw_rows(distribution: Distribution, key: int, parameter_id: int, rows: Tensor, width: int) -> Tensor:
    """Return z of the given rows of a parameter of that width: fp32 [len(rows), width]."""
    per_block, of_blocks = _DISTRIBUTIONS[distribution]
    starts = (rows * width)[:, None]
    # A row touches at most this many blocks, wherever in a block it starts.
    num_blocks = (width + 2 * (per_block - 1)) // per_block
    blocks = starts // per_block + torch.arange(num_blocks, device=rows.device)
    z = of_blocks(key, parameter_id, blocks).view(len(rows), -1)
    return z.gather(1, starts % per_block + torch.arange(width, device=rows.device))


def dither_words(key: int, parameter_id: int, start: int, count: int, device: torch.device) -> Tensor:
    """Return the dither words of elements [start, start + count): int64 [count], unsigned 32-bit values."""
    return _draw(_DITHER, key, parameter_id, start, count, device)


def _draw(drawn: _Drawn, key: int, parameter_id: int, start: int, count: int, device: torch.device) -> Tensor:
    first, last = start // drawn.per_block, -(-(start + count) // drawn.per_block)
    blocks = torch.arange(first, last, dtype=torch.int64, device=device)
    offset = start % drawn.per_block
    return drawn.of_blocks(key, parameter_id, blocks).reshape(-1)[offset : offset + count]
