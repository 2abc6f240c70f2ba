"""The operations of directions of low rank for CUDA devices, with Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.gpu import (
    BLOCKS_OF_TILE,
    TRITON_TYPES,
    CompiledKernel,
    num_tiles,
    on_device,
)
from lezo_ds.noise.low_rank import LowRankNoise, Matrix, Subtraction
from lezo_ds.noise.philox import PER_BLOCK
from lezo_ds.zo.laws import LowRankLaw
from lezo_ds.zo.updates import UpdatePrecision

_BLOCKS_OF_SUBTRACTION = 256  # of 4 elements


class TritonLowRankNoise(LowRankNoise):
    """One launch draws a or b of a matrix for all directions, and one updates a matrix."""

    def __init__(self, law: LowRankLaw, device: torch.device) -> None:
        super().__init__(law)
        self._device = device

    def _entries(
        self, matrix: Matrix, keys: Sequence[int], first: int, distance: int, count: int
    ) -> Tensor:
        num_runs = len(keys) * self.law.rank
        out = torch.empty(num_runs, count, device=self._device)
        entries = self.law.entries
        per_block = PER_BLOCK[entries]
        num_blocks = BLOCKS_OF_TILE[entries]
        # A run may begin at any element of a block.
        tiles_of_run = -(-(per_block - 1 + count) // (per_block * num_blocks))
        kernel = _compiled(
            kernels.entries_kernel,
            (("distribution", entries), ("per_block", per_block), ("num_blocks", num_blocks)),
        )
        kernel.run(
            (num_runs, tiles_of_run, 1),  # only the first number may be above 65,535
            out,
            _keys_on_device(tuple(keys), self._device),
            matrix.parameter_id,
            first,
            distance,
            count,
            self.law.rank,
        )
        return out

    def _subtract(self, subtraction: Subtraction, precision: UpdatePrecision) -> None:
        target, matrix, u, b, factor, dither_key = subtraction
        values = target.values
        region = target.region
        is_fp32 = values.dtype == torch.float32
        count = values.numel()
        low = values if target.low is None else target.low
        kernel = _compiled(
            kernels.subtract_kernel,
            (
                ("dtype", TRITON_TYPES[values.dtype]),
                ("storage", "fp32" if is_fp32 else precision),
                ("layout", "rows" if region.width else "any"),
                ("num_blocks", _BLOCKS_OF_SUBTRACTION),
            ),
            are_aligned=(values.data_ptr() % 16 == 0, low.data_ptr() % 16 == 0),
        )
        kernel.run(
            (num_tiles(region, count, 4, _BLOCKS_OF_SUBTRACTION), 1, 1),
            values,
            low,
            u.contiguous(),
            b.contiguous(),
            factor,
            dither_key,
            target.parameter_id,
            *region,
            count,
            len(u),
            matrix.num_columns,
            matrix.rows.start,
            len(matrix.rows),
            matrix.columns.start,
            len(matrix.columns),
        )


@functools.cache
def _compiled(
    kernel: Any, constants: tuple[tuple[str, Any], ...], are_aligned: tuple[bool, ...] = ()
) -> CompiledKernel:
    """Return a kernel with its constants, the same one at each call.

    Args:
        kernel: a function of `triton.jit`.
        constants: its last arguments, by name.
        are_aligned: which of its tensors begin at a multiple of 16 bytes, if they differ in that.
            A compiled kernel serves only those that are alike.
    """
    return CompiledKernel(kernel, dict(constants))


# All matrices of a step have the same directions.
@functools.lru_cache(maxsize=4)
def _keys_on_device(keys: tuple[int, ...], device: torch.device) -> Tensor:
    return on_device(torch.from_numpy(np.array(keys, dtype=np.uint64)), device)
