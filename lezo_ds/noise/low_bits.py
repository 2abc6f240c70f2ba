"""The 16 bits of a float32 weight that a 16-bit weight cannot hold (`fp32_master`).

Loading a model makes them here. The kernels join the two halves, update them and split them again;
docs/file-formats.md has the formulas.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_master(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split fp32 values into (high in `dtype`, low in int16): low has the bits that high loses.

    bf16: `high` is the nearest bf16 (ties away from zero) and `low` is the difference of the bit
    patterns, so that every number survives, and each NaN becomes the same one. fp16: `high` is the
    nearest fp16 (ties to even; 0x7E00 for each NaN) and `low` is the difference in units of 2**-15
    of high's last place.
    This is exact for 2**-14 <= |x| < 65520 and within 2**-40 for smaller |x|; for larger |x|, high
    is infinite and low is 0.
    """
    if dtype == torch.bfloat16:
        # The largest NaN, which GPUs compute, would wrap to -0.0 in `high`.
        bits = values.view(torch.int32).where(~values.isnan(), 0x7FC00000)
        high_bits = (bits + 0x8000) >> 16
        low = bits - (high_bits << 16)
        return high_bits.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)
    high = values.to(torch.float16).masked_fill(values.isnan(), torch.nan)
    wide = high.to(torch.float32)
    exponent = ((wide.view(torch.int32) >> 23) & 0xFF).clamp(min=127 - 14)
    # One unit of low is 2**(exponent - 127 - 10 - 15). Its reciprocal has the opposite exponent.
    per_unit = ((127 + 127 + 10 + 15 - exponent) << 23).view(torch.float32)
    low = torch.round((values - wide) * per_unit)
    return high, torch.where(high.isfinite(), low, 0).to(torch.int16)
