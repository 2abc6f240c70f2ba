"""The operations of directions of low rank for CUDA devices, with Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.gpu import BLOCKS_OF_TILE, TRITON_TYPES, num_tiles, on_device
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
        kernels.entries_kernel[(tiles_of_run, num_runs, 1)](
            out,
            _keys_on_device(tuple(keys), self._device),
            matrix.parameter_id,
            first,
            distance,
            count,
            self.law.rank,
            distribution=entries,
            per_block=per_block,
            num_blocks=num_blocks,
            # A fused multiply-add rounds once where the other backends round twice.
            enable_fp_fusion=False,
        )
        return out

    def _subtract(self, subtraction: Subtraction, precision: UpdatePrecision) -> None:
        target, matrix, u, b, factor, dither_key = subtraction
        values = target.values
        region = target.region
        is_fp32 = values.dtype == torch.float32
        count = values.numel()
        grid = (num_tiles(region, count, 4, _BLOCKS_OF_SUBTRACTION), 1, 1)
        kernels.subtract_kernel[grid](
            values,
            values if target.low is None else target.low,
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
            dtype=TRITON_TYPES[values.dtype],
            storage="fp32" if is_fp32 else precision,
            layout="rows" if region.width else "any",
            num_blocks=_BLOCKS_OF_SUBTRACTION,
            enable_fp_fusion=False,
        )


# All matrices of a step have the same directions.
@functools.lru_cache(maxsize=4)
def _keys_on_device(keys: tuple[int, ...], device: torch.device) -> Tensor:
    return on_device(torch.from_numpy(np.array(keys, dtype=np.uint64)), device)
