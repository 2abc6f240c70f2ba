"""How an fp32 value is stored in fp32, bf16 or fp16: the eager reference of every backend.

A zeroth-order update is far below half a unit in the last place of most 16-bit weights, so round-to-nearest
loses it. Two ways keep it: stochastic rounding with a replayable dither, and 16 further low bits kept beside
the 16-bit value. All of it is integer arithmetic and exact fp32 operations: the same bits on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lezo_ds.zo.precision import UpdatePrecision as UpdatePrecision

STORAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_SMALLEST_NORMAL_FP16 = 0x38800000  # the fp32 bits of 2**-14
_FP16_EXPONENT_OFFSET = 0x1C000  # (127 - 15) << 10: fp32's exponent bias less fp16's, in fp16's position
_ROUNDER = 12582912.0  # 1.5 * 2**23: adding it to |q| < 2**22 leaves rint(q) in the low bits


def round_stochastic(values: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to one of the two neighbours in `dtype`, each the likelier the nearer it is.

    bf16: the low 16 bits of the word are added to the fp32 bits, then 16 bits are cut off. fp16: likewise 13
    bits where |x| >= 2**-14; below, |x| in units of 2**-44 (cut off) plus the word's low 20 bits loses its
    last 20 bits. fp32 is returned unchanged; infinities and NaN stay what they are.

    Args:
        values: fp32, any shape.
        words: int64 unsigned 32-bit dither words, the shape of `values`.
        dtype: fp32, bf16 or fp16.

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
        # The clamp keeps the conversion to an integer defined where the result is not used.
        fixed_point = (values.abs().clamp(max=2.0**-14) * 2.0**44).to(torch.int32)
        subnormal = (fixed_point + (dither & 0xFFFFF)) >> 20
        rounded = torch.where(magnitude < _SMALLEST_NORMAL_FP16, subnormal, normal.clamp(max=0x7C00))
        rounded = rounded | ((bits >> 31) << 15)
    return torch.where(values.isnan(), values.to(dtype), rounded.to(torch.int16).view(dtype))


def split_master(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Split fp32 values into what is stored as `dtype` and the low bits beside it.

    bf16: `high` is the nearest bf16 (ties away from zero), `low` the difference of the bit patterns: every
    bit pattern survives. fp16: `high` is the nearest fp16 (ties to even), `low` the difference in units of
    2**-15 of high's last place: exact for 2**-14 <= |x| < 65520, within 2**-40 below; beyond, high is
    infinite and low is 0.

    Args:
        values: fp32, any shape.
        dtype: fp32, bf16 or fp16.

    Returns:
        (high in `dtype`, low in int16), both in the shape of `values`; low is None for fp32.

    """
    if dtype == torch.float32:
        return values, None
    if dtype == torch.bfloat16:
        bits = values.view(torch.int32)
        high_bits = (bits + 0x8000) >> 16  # wraps for some NaN, and unwraps in join_master
        low_bits = bits - (high_bits << 16)
        return high_bits.to(torch.int16).view(torch.bfloat16), low_bits.to(torch.int16)
    high = values.to(torch.float16)
    unit_exponent = _low_unit_exponent(high)
    per_unit = ((254 - unit_exponent) << 23).view(torch.float32)
    quotient = (values - high.to(torch.float32)) * per_unit
    low_bits = (quotient + _ROUNDER).view(torch.int32) - 0x4B400000  # the bits of _ROUNDER
    return high, torch.where(high.isfinite(), low_bits, 0).to(torch.int16)


def join_master(high: Tensor, low: Tensor | None) -> Tensor:
    """Return the fp32 values of which `split_master` made (high, low)."""
    if low is None:
        return high.to(torch.float32)
    if high.dtype == torch.bfloat16:
        return ((high.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)
    unit = (_low_unit_exponent(high) << 23).view(torch.float32)
    return high.to(torch.float32) + low.to(torch.float32) * unit


def store(
    values: Tensor, shard: Tensor, low: Tensor | None, precision: UpdatePrecision, words: Tensor | None
) -> None:
    """Write fp32 values into `shard` (and `low`), in place, by `precision`.

    Args:
        values: fp32 [n].
        shard: fp32, bf16 or fp16 [n].
        low: int16 [n] for "fp32_master" over 16 bits, else None.
        precision: how to round.
        words: dither [n] for "stochastic" over 16 bits, else None.

    """
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
    """Return the biased fp32 exponent of one unit of `low`: 2**-15 of the last place of an fp16 value."""
    exponent = (high.to(torch.float32).view(torch.int32) >> 23) & 0xFF
    return exponent.clamp(min=127 - 14) - 10 - 15
