"""How an fp32 value is stored in fp32, bf16 or fp16: the reference of every backend.

A zeroth-order update is far below half a unit in the last place of most 16-bit weights, so rounding to
nearest loses it. Two methods keep it: stochastic rounding with a dither that can be replayed, and 16 low bits
that are stored in addition to the 16-bit value. Both use only integer arithmetic and exact fp32 operations,
so every device gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST_NORMAL_FP16 = 0x38800000  # the fp32 bits of 2**-14
_FP16_EXPONENT_OFFSET = 0x1C000  # (127 - 15) << 10: fp32's exponent bias minus fp16's, at fp16's position
_ROUNDER = 12582912.0  # 1.5 * 2**23: adding it to |q| < 2**22 leaves rint(q) in the low bits


def round_stochastic(values: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to one of the two neighbors in `dtype`; the nearer one is proportionally more likely.

    bf16: the low 16 bits of the dither word are added to the fp32 bits, then the last 16 bits are cut off.
    fp16: if |x| >= 2**-14, the same with 13 bits; otherwise |x| is expressed in units of 2**-44 (truncated),
    the low 20 bits of the word are added, and the last 20 bits are cut off. fp32, infinities and NaN do not
    change.
    """
    if dtype == torch.float32:
        return values
    bits = values.view(torch.int32)
    dither = words.to(torch.int32)
    if dtype == torch.bfloat16:
        rounded = (bits + (dither & 0xFFFF)) >> 16
    else:
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + (dither & 0x1FFF)) >> 13) - _FP16_EXPONENT_OFFSET
        # Larger values do not use this result; the clamp only keeps their conversion to an integer defined.
        fixed_point = (values.abs().clamp(max=2.0**-14) * 2.0**44).to(torch.int32)
        subnormal = (fixed_point + (dither & 0xFFFFF)) >> 20
        rounded = torch.where(magnitude < _SMALLEST_NORMAL_FP16, subnormal, normal.clamp(max=0x7C00))
        rounded = rounded | ((bits >> 31) << 15)
    return torch.where(values.isnan(), values.to(dtype), rounded.to(torch.int16).view(dtype))


def split_master(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Split fp32 values into (high in `dtype`, low in int16): the low bits are those that `dtype` loses.

    bf16: `high` is the nearest bf16 (ties away from zero) and `low` is the difference of the bit patterns, so
    that every bit pattern survives. fp16: `high` is the nearest fp16 (ties to even) and `low` is the
    difference in units of 2**-15 of high's last place. This is exact for 2**-14 <= |x| < 65520 and within
    2**-40 for smaller |x|; for larger |x|, high is infinite and low is 0. fp32: `low` is None.
    """
    if dtype == torch.float32:
        return values, None
    if dtype == torch.bfloat16:
        bits = values.view(torch.int32)
        high_bits = (bits + 0x8000) >> 16  # wraps for some NaN, and unwraps in join_master
        low_bits = bits - (high_bits << 16)
        return high_bits.to(torch.int16).view(torch.bfloat16), low_bits.to(torch.int16)
    high = values.to(torch.float16)
    per_unit = ((254 - _low_unit_exponent(high)) << 23).view(torch.float32)
    quotient = (values - high.to(torch.float32)) * per_unit
    low_bits = (quotient + _ROUNDER).view(torch.int32) - 0x4B400000  # the bits of _ROUNDER
    return high, torch.where(high.isfinite(), low_bits, 0).to(torch.int16)


def join_master(high: Tensor, low: Tensor | None) -> Tensor:
    """Return the fp32 values that `split_master` split into (high, low)."""
    if low is None:
        return high.to(torch.float32)
    if high.dtype == torch.bfloat16:
        return ((high.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)
    unit = (_low_unit_exponent(high) << 23).view(torch.float32)
    return high.to(torch.float32) + low.to(torch.float32) * unit


def store(values: Tensor, shard: Tensor, low: Tensor | None, words: Tensor | None) -> None:
    """Write fp32 values [n] to a shard and its low bits, if there are any; dithered if there are words."""
    if low is not None:
        high, low_values = split_master(values, shard.dtype)
        assert low_values is not None
        shard.copy_(high)
        low.copy_(low_values)
    elif words is not None:
        shard.copy_(round_stochastic(values, words, shard.dtype))
    else:
        shard.copy_(values)


def _low_unit_exponent(high: Tensor) -> Tensor:
    """Return the biased fp32 exponent of one unit of `low`, which is 2**-15 of the last place of `high`."""
    exponent = (high.to(torch.float32).view(torch.int32) >> 23) & 0xFF
    return exponent.clamp(min=127 - 14) - 10 - 15
