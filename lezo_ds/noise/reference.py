"""The noise and its operations in plain PyTorch: the reference of every backend.

Where no compiler is found, it is also the backend of CPUs. All numbers come from Philox4x32-10, the
counter-based generator of Salmon et al. 2011:

    counter   c0 c1 = low and high word of the block's index,  c2 = parameter id,  c3 = stream
              |
              |  encrypted with the 64-bit key
              v
    words     w0 w1 w2 w3, 32 bits each, for each block
              stream 0: 4 normals, elements 4b to 4b + 3 of block b
              stream 1: 4 dither words, by which elements 4b to 4b + 3 are rounded
              stream 2: 128 signs; bit i of word j is that of element 128b + 32j + i

Normals are computed by Box-Muller. Logarithm, sine and cosine are polynomials of IEEE fp32
additions and multiplications, each rounded on its own, so that PyTorch, C++ and Triton produce the
same bits; the functions of their libraries differ in the last ones.

A zeroth-order update is far below half a unit in the last place of most 16-bit weights, so rounding
to nearest would lose it. Two exact methods keep it: stochastic rounding with a dither that can be
replayed, and 16 low bits in addition to the 16-bit value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lezo_ds.noise import NoiseBackend, Region, UpdateTarget, Weight
from lezo_ds.zo.laws import Distribution
from lezo_ds.zo.updates import Update, UpdatePrecision

NORMAL_STREAM = 0
DITHER_STREAM = 1
RADEMACHER_STREAM = 2
PER_BLOCK: dict[Distribution, int] = {"normal": 4, "rademacher": 128}
"""Number of elements whose entries one block of words gives."""

CHUNK = 1 << 18
"""Elements that `EagerNoise` works on at a time. Their temporaries stay near the processor's cache:
they take about 50 bytes an element."""

Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""The words w0 to w3 of blocks: int64 tensors of unsigned 32-bit values, of one shape."""

_MASK32 = 0xFFFFFFFF
# Cephes logf: log(1 + x) = x - x**2/2 + x**3 P(x) on [sqrt(1/2) - 1, sqrt(2) - 1], highest power
# first.
_LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_SQRT2 = 1.4142135381698608
# ln 2 in two parts (Cody and Waite): the high part times a small integer is exact in fp32.
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
# Cephes sinf and cosf on [-pi/4, pi/4], highest power first.
_SIN_COEFFICIENTS = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS_COEFFICIENTS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_QUARTER_PI_OVER_2_31 = 3.657291987e-10
_SMALLEST_NORMAL_FP16 = 0x38800000  # the fp32 bits of 2**-14
# (127 - 15) << 10: fp32's exponent bias minus fp16's, where fp16 has its exponent.
_FP16_EXPONENT_OFFSET = 0x1C000
# 1.5 * 2**23: a sum of it and |q| < 2**22 has rint(q) in its low bits.
_ROUNDER = 12582912.0
_ROUNDER_BITS = 0x4B400000


def draw(
    distribution: Distribution,
    key: int,
    parameter_id: int,
    start: int,
    count: int,
    device: torch.device,
) -> Tensor:
    """Return z of elements [start, start + count) of one parameter: fp32 [count]."""
    per_block = PER_BLOCK[distribution]
    first_block = start // per_block
    last_block = (start + count - 1) // per_block
    blocks = torch.arange(first_block, last_block + 1, device=device)
    z = _of_blocks(distribution, key, parameter_id, blocks)
    return z.reshape(-1)[start % per_block :][:count]


def draw_at(distribution: Distribution, key: int, parameter_id: int, elements: Tensor) -> Tensor:
    """Return z of some elements of one parameter, int64 of any shape: fp32 of that shape."""
    per_block = PER_BLOCK[distribution]
    z = _of_blocks(distribution, key, parameter_id, elements // per_block)
    return _select(z, elements % per_block)


def words_at(key: int, parameter_id: int, elements: Tensor, stream: int) -> Tensor:
    """Return a word for each of some elements: int64 of their shape, unsigned 32-bit values."""
    words = words_of_blocks(key, parameter_id, elements // 4, stream)
    return _select(torch.stack(words, -1), elements % 4)


def _select(of_blocks: Tensor, positions: Tensor) -> Tensor:
    """Return one entry of each block: [*shape] of [*shape, entries of a block]."""
    return of_blocks.gather(-1, positions[..., None])[..., 0]


def elements_of(region: Region, first: int, last: int, device: torch.device) -> Tensor:
    """Return where elements `first` to `last` - 1 of a region lie in the full parameter.

    Returns:
        int64 [last - first], indices in the parameter's row-major order.
    """
    positions = torch.arange(first, last, device=device)
    if region.width:
        rows = positions // region.width
        positions = rows * region.stride + positions % region.width
    return positions + region.start


def words_of_blocks(key: int, parameter_id: int, blocks: Tensor, stream: int) -> Words:
    """Return the four words of each block of a stream, of the shape of `blocks` (int64)."""
    zero = torch.zeros((), dtype=torch.int64, device=blocks.device)
    counter = (blocks & _MASK32, (blocks >> 32) & _MASK32, zero + parameter_id, zero + stream)
    return philox4x32_10(counter, key=(key & _MASK32, key >> 32))


def philox4x32_10(counter: Words, key: tuple[int, int]) -> Words:
    """Encrypt a 128-bit counter with a 64-bit key, both given as 32-bit words, the low one first.

    Source: Salmon et al. 2011, section 3.3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # Signed products wrap modulo 2**64, and >> copies the sign: after the masks, both halves
        # are exact.
        product0 = c0 * 0xD2511F53
        product1 = c2 * 0xCD9E8D57
        c0 = ((product1 >> 32) & _MASK32) ^ c1 ^ k0
        c1 = product1 & _MASK32
        c2 = ((product0 >> 32) & _MASK32) ^ c3 ^ k1
        c3 = product0 & _MASK32
        k0 = (k0 + 0x9E3779B9) & _MASK32
        k1 = (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def box_muller(word0: Tensor, word1: Tensor, word2: Tensor, word3: Tensor) -> Tensor:
    """Return four standard normals of four words: fp32, the shape of a word plus a last axis of 4.

    |z| is at most sqrt(-2 ln 2**-24) = 5.77.
    """
    radius01 = _sqrt(_minus_two_log_uniform(word0))
    radius23 = _sqrt(_minus_two_log_uniform(word2))
    sin01, cos01 = _sin_cos(word1)
    sin23, cos23 = _sin_cos(word3)
    z01 = [radius01 * cos01, radius01 * sin01]
    z23 = [radius23 * cos23, radius23 * sin23]
    return torch.stack(z01 + z23, -1)


def _of_blocks(distribution: Distribution, key: int, parameter_id: int, blocks: Tensor) -> Tensor:
    """Return z of all elements of the blocks: fp32 [*blocks.shape, elements of a block]."""
    if distribution == "normal":
        return box_muller(*words_of_blocks(key, parameter_id, blocks, NORMAL_STREAM))
    # A set bit stands for -1. The lowest bit of a word comes first.
    words = torch.stack(words_of_blocks(key, parameter_id, blocks, RADEMACHER_STREAM), -1)
    positions = torch.arange(32, device=blocks.device)
    bits = (words[..., None] >> positions) & 1  # [*blocks.shape, 4, 32]
    signs = 1 - 2 * bits
    return signs.flatten(-2).to(torch.float32)


def _minus_two_log_uniform(word: Tensor) -> Tensor:
    """Return -2 ln u in fp32 for u = (2 (word >> 9) + 1) / 2**24, which is never 0 or 1."""
    odd = (word >> 9) * 2 + 1
    bits = _bits(odd.to(torch.float32))  # 24 bits: exact
    # u = 2**exponent * mantissa, with the mantissa in (sqrt(1/2), sqrt(2)].
    mantissa = _from_bits((bits & 0x7FFFFF) | 0x3F800000)
    exponent = (bits >> 23) - 127 - 24
    is_above = mantissa > _SQRT2
    mantissa = torch.where(is_above, mantissa * 0.5, mantissa)
    exponent = torch.where(is_above, exponent + 1, exponent).to(torch.float32)
    x = mantissa - 1.0
    square = x * x
    tail = _polynomial(x, _LOG_COEFFICIENTS) * x * square + exponent * _LN2_LOW - square * 0.5
    return ((x + tail) + exponent * _LN2_HIGH) * -2.0


def _sin_cos(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sine, cosine) of the angle that a word stands for, which is uniform on the circle.

    The top two bits select the quadrant, and the rest is an angle x in [-pi/4, pi/4):

        quadrant   0              1               2                3
        result     sin x, cos x   cos x, -sin x   -sin x, -cos x   -cos x, sin x
    """
    quadrant = word >> 30
    rest = (word << 2) & _MASK32
    as_signed = rest - ((rest >> 31) << 32)
    x = as_signed.to(torch.float32) * _QUARTER_PI_OVER_2_31
    square = x * x
    sine = _polynomial(square, _SIN_COEFFICIENTS) * square * x + x
    cosine = _polynomial(square, _COS_COEFFICIENTS) * (square * square) - square * 0.5 + 1.0
    is_odd = (quadrant & 1) == 1
    first = torch.where(is_odd, cosine, sine)
    second = torch.where(is_odd, sine, cosine)
    first = torch.where(quadrant >= 2, -first, first)
    second = torch.where((quadrant == 1) | (quadrant == 2), -second, second)
    return first, second


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return a polynomial by Horner's rule, the coefficient of the highest power first."""
    value = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * x + coefficient
    return value


def _sqrt(x: Tensor) -> Tensor:
    # PyTorch's eager square root is not correctly rounded on the CPU; NumPy's is.
    if x.device.type == "cpu":
        return torch.from_numpy(np.sqrt(x.numpy()))
    return torch.sqrt(x)


def round_stochastic(values: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values to one of their two neighbors in `dtype`, at random and without bias.

    The nearer neighbor is proportionally more likely. bf16: the low 16 bits of the dither word are
    added to the fp32 bits, then the last 16 bits are cut off. fp16: if |x| >= 2**-14, the same with
    13 bits; otherwise |x| is expressed in units of 2**-44 (truncated), the low 20 bits of the word
    are added, and the last 20 bits are cut off. Infinities and NaN do not change.

    Args:
        values: fp32 of any shape.
        words: their dither words, int64 of the same shape (see `words_at`).
        dtype: bf16 or fp16.
    """
    bits = _bits(values)
    dither = words.to(torch.int32)
    if dtype == torch.bfloat16:
        rounded = (bits + (dither & 0xFFFF)) >> 16
    else:
        rounded = _fp16_stochastic(values, dither) | ((bits >> 31) << 15)
    stored = rounded.to(torch.int16).view(dtype)
    return torch.where(values.isnan(), values.to(dtype), stored)


def _fp16_stochastic(values: Tensor, dither: Tensor) -> Tensor:
    """Return the bits of |values| in fp16, rounded at random: int32."""
    magnitude = _bits(values) & 0x7FFFFFFF
    normal = ((magnitude + (dither & 0x1FFF)) >> 13) - _FP16_EXPONENT_OFFSET
    # Larger values do not use this result. The clamp keeps their conversion to an integer defined.
    below = values.abs().clamp(max=2.0**-14)
    fixed_point = (below * 2.0**44).to(torch.int32)
    subnormal = (fixed_point + (dither & 0xFFFFF)) >> 20
    is_subnormal = magnitude < _SMALLEST_NORMAL_FP16
    return torch.where(is_subnormal, subnormal, normal.clamp(max=0x7C00))


def split_master(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Split fp32 values into (high in `dtype`, low in int16): low has the bits that high loses.

    bf16: `high` is the nearest bf16 (ties away from zero) and `low` is the difference of the bit
    patterns, so that every bit pattern survives. fp16: `high` is the nearest fp16 (ties to even)
    and `low` is the difference in units of 2**-15 of high's last place. This is exact for
    2**-14 <= |x| < 65520 and within 2**-40 for smaller |x|; for larger |x|, high is infinite and
    low is 0. fp32: `high` is the value and `low` is None.
    """
    if dtype == torch.float32:
        return values, None
    if dtype == torch.bfloat16:
        bits = _bits(values)
        high_bits = (bits + 0x8000) >> 16  # wraps for some NaN, and unwraps in join_master
        low = (bits - (high_bits << 16)).to(torch.int16)
        return high_bits.to(torch.int16).view(torch.bfloat16), low
    high = values.to(torch.float16)
    lost = values - high.to(torch.float32)
    # The reciprocal of a power of two: its exponent has the opposite sign.
    per_unit = _from_bits((254 - _low_unit_exponent(high)) << 23)
    low_bits = _bits(lost * per_unit + _ROUNDER) - _ROUNDER_BITS
    low = torch.where(high.isfinite(), low_bits, 0).to(torch.int16)
    return high, low


def join_master(high: Tensor, low: Tensor | None) -> Tensor:
    """Return the fp32 values that `split_master` split into (high, low)."""
    if low is None:
        return high.to(torch.float32)
    if high.dtype == torch.bfloat16:
        high_bits = high.view(torch.int16).to(torch.int32) << 16
        return _from_bits(high_bits + low)
    unit = _from_bits(_low_unit_exponent(high) << 23)
    return high.to(torch.float32) + low.to(torch.float32) * unit


def _low_unit_exponent(high: Tensor) -> Tensor:
    """Return the biased fp32 exponent of one unit of `low`: 2**-15 of the last place of `high`."""
    bits = _bits(high.to(torch.float32))
    exponent = (bits >> 23) & 0xFF
    return exponent.clamp(min=127 - 14) - 10 - 15


def _bits(values: Tensor) -> Tensor:
    """Return the bit patterns of fp32 values as int32."""
    return values.view(torch.int32)


def _from_bits(bits: Tensor) -> Tensor:
    """Return the fp32 values of bit patterns, int32."""
    return bits.view(torch.float32)


class EagerNoise(NoiseBackend):
    """`NoiseBackend` in PyTorch, on any device."""

    def _perturb(
        self, weights: Sequence[Weight], key: int, scale: float, num_signs: int
    ) -> list[list[Tensor]]:
        signed_scales = (scale, -scale)[:num_signs]
        copies = []
        for weight in weights:
            if weight.rows is None:
                copies.append(self._perturb_all(weight, key, signed_scales))
            else:
                copies.append(self._perturb_rows(weight, weight.rows, key, signed_scales))
        return copies

    def _perturb_all(self, weight: Weight, key: int, scales: Sequence[float]) -> list[Tensor]:
        theta = weight.theta.reshape(-1)
        copies = [torch.empty_like(theta, dtype=weight.out_dtype) for _ in scales]
        for first, last in _chunks(theta.numel(), CHUNK):
            values = theta[first:last].to(torch.float32)
            z = self._draw(key, weight.parameter_id, weight.region, first, last)
            for copy, scale in zip(copies, scales, strict=True):
                copy[first:last] = values + z * scale
        return [copy.view(weight.theta.shape) for copy in copies]

    def _perturb_rows(
        self, weight: Weight, rows: Tensor, key: int, scales: Sequence[float]
    ) -> list[Tensor]:
        width = weight.theta.shape[1]
        columns = torch.arange(width, device=rows.device)
        shape = (len(rows), width)
        copies = [torch.empty(shape, dtype=weight.out_dtype, device=rows.device) for _ in scales]
        for first, last in _chunks(len(rows), max(1, CHUNK // width)):
            chunk = rows[first:last]
            values = weight.theta[chunk].to(torch.float32)
            elements = weight.region.start + chunk[:, None] * width + columns
            z = draw_at(self.law.entries, key, weight.parameter_id, elements)
            for copy, scale in zip(copies, scales, strict=True):
                copy[first:last] = values + z * scale
        return copies

    def update_(
        self,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        for target in targets:
            for first, last in _chunks(target.values.numel(), CHUNK):
                for update in updates:
                    self._update_chunk(target, update, precision, first, last)

    def _update_chunk(
        self,
        target: UpdateTarget,
        update: Update,
        precision: UpdatePrecision,
        first: int,
        last: int,
    ) -> None:
        """Do one update of elements `first` to `last` - 1 of a target."""
        high = target.values[first:last]
        low = None if target.low is None else target.low[first:last]
        z = self._draw(update.key, target.parameter_id, target.region, first, last)
        value = join_master(high, low) * update.factor - z * update.coefficient
        if low is not None:
            new_high, new_low = split_master(value, high.dtype)
            assert new_low is not None
            low.copy_(new_low)
            high.copy_(new_high)
        elif precision == "stochastic" and high.dtype != torch.float32:
            elements = elements_of(target.region, first, last, high.device)
            words = words_at(update.key, target.parameter_id, elements, DITHER_STREAM)
            high.copy_(round_stochastic(value, words, high.dtype))
        else:
            high.copy_(value)

    def _draw(self, key: int, parameter_id: int, region: Region, first: int, last: int) -> Tensor:
        """Return z of elements `first` to `last` - 1 of a region: fp32 [last - first]."""
        entries = self.law.entries
        if region.width == 0:  # one row: no block is drawn twice
            start = region.start + first
            return draw(entries, key, parameter_id, start, last - first, self.device)
        elements = elements_of(region, first, last, self.device)
        return draw_at(entries, key, parameter_id, elements)


def _chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of the ranges of at most `size` that [0, count) consists of."""
    for first in range(0, count, size):
        yield first, min(first + size, count)
