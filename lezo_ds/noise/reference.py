"""The noise and its operations in plain PyTorch: the reference of every backend, and the fallback of CPUs.

Philox4x32-10, the counter-based generator of Salmon et al. 2011, encrypts the counter (block low word, block
high word, parameter id, stream) with the 64-bit key, and gives four 32-bit words for each block of elements.

Normals are computed by Box-Muller. Logarithm, sine and cosine are polynomials of IEEE fp32 additions and
multiplications, each rounded on its own, so that PyTorch, C++ and Triton produce the same bits. Signs, the
directions of Spall's simultaneous perturbations (1992), are the bits of the words.

A zeroth-order update is far below half a unit in the last place of most 16-bit weights, so rounding to
nearest loses it. Two exact methods keep it: stochastic rounding with a dither that can be replayed, and 16
low bits in addition to the 16-bit value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lezo_ds.noise import NoiseBackend, Region, UpdateTarget, Weight
from lezo_ds.zo.laws import Distribution
from lezo_ds.zo.updates import Update, UpdatePrecision

NORMAL_STREAM, DITHER_STREAM, RADEMACHER_STREAM = 0, 1, 2
PER_BLOCK: dict[Distribution, int] = {"normal": 4, "rademacher": 128}

_MASK32 = 0xFFFFFFFF
# Cephes logf: log(1 + x) = x - x**2/2 + x**3 P(x) on [sqrt(1/2) - 1, sqrt(2) - 1], highest power first.
_LOG_COEFFICIENTS = [
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
]
_LOG_COEFFICIENTS += [-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1]
_SQRT2 = 1.4142135381698608
# ln 2 in two parts (Cody and Waite): the high part times a small integer is exact in fp32.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Cephes sinf and cosf on [-pi/4, pi/4], highest power first.
_SIN_COEFFICIENTS = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS_COEFFICIENTS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_QUARTER_PI_OVER_2_31 = 3.657291987e-10
_SMALLEST_NORMAL_FP16 = 0x38800000  # the fp32 bits of 2**-14
_FP16_EXPONENT_OFFSET = (
    0x1C000  # (127 - 15) << 10: fp32's exponent bias minus fp16's, at fp16's position
)
_ROUNDER = 12582912.0  # 1.5 * 2**23: adding it to |q| < 2**22 leaves rint(q) in the low bits
CHUNK = 1 << 18  # elements; their temporaries (about 50 bytes an element) stay near the cache

Words = tuple[Tensor, Tensor, Tensor, Tensor]
_Part = tuple[Region, int, int, torch.device]  # elements of a part, from first to last


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
    z = _of_blocks(distribution, key, parameter_id, _blocks(start, count, per_block, device))
    return z.reshape(-1)[start % per_block :][:count]


def draw_at(distribution: Distribution, key: int, parameter_id: int, elements: Tensor) -> Tensor:
    """Return z of some elements of a parameter, int64 of any shape: fp32 of that shape."""
    per_block = PER_BLOCK[distribution]
    z = _of_blocks(distribution, key, parameter_id, elements // per_block)
    return z.gather(-1, (elements % per_block)[..., None])[..., 0]


def words_at(key: int, parameter_id: int, elements: Tensor, stream: int) -> Tensor:
    """Return a word for each of some elements: int64 of their shape, unsigned 32-bit values."""
    words = torch.stack(words_of_blocks(key, parameter_id, elements // 4, stream), -1)
    return words.gather(-1, (elements % 4)[..., None])[..., 0]


def elements_of(region: Region, first: int, last: int, device: torch.device) -> Tensor:
    """Return the indices of elements `first` to `last` - 1 of a part in the full parameter: int64."""
    places = torch.arange(first, last, device=device)
    if region.width:
        places = places // region.width * region.stride + places % region.width
    return places + region.start


def words_of_blocks(key: int, parameter_id: int, blocks: Tensor, stream: int) -> Words:
    """Return the four words of each block: int64 of unsigned 32-bit values, like `blocks` (int64)."""
    zero = torch.zeros((), dtype=torch.int64, device=blocks.device)
    counter = (blocks & _MASK32, (blocks >> 32) & _MASK32, zero + parameter_id, zero + stream)
    return philox4x32_10(counter, (key & _MASK32, key >> 32))


def philox4x32_10(counter: Words, key: tuple[int, int]) -> Words:
    """Encrypt a 128-bit counter with a 64-bit key (Salmon et al. 2011, section 3.3), all as 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # Signed products wrap modulo 2**64 and >> copies the sign; after the masks both halves are exact.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product1 >> 32) & _MASK32) ^ c1 ^ k0, product1 & _MASK32
        c2, c3 = ((product0 >> 32) & _MASK32) ^ c3 ^ k1, product0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def box_muller(word0: Tensor, word1: Tensor, word2: Tensor, word3: Tensor) -> Tensor:
    """Return four standard normals of four words: fp32, the shape of a word plus a last axis of 4.

    |z| is at most sqrt(-2 ln 2**-24) = 5.77.
    """
    radius01, radius23 = _sqrt(_minus_two_log_uniform(word0)), _sqrt(_minus_two_log_uniform(word2))
    sin01, cos01 = _sin_cos(word1)
    sin23, cos23 = _sin_cos(word3)
    return torch.stack([radius01 * cos01, radius01 * sin01, radius23 * cos23, radius23 * sin23], -1)


def _blocks(start: int, count: int, per_block: int, device: torch.device) -> Tensor:
    return torch.arange(start // per_block, -(-(start + count) // per_block), device=device)


def _of_blocks(distribution: Distribution, key: int, parameter_id: int, blocks: Tensor) -> Tensor:
    """Return z of all elements of the blocks: fp32, the shape of `blocks` plus a last axis."""
    if distribution == "normal":
        return box_muller(*words_of_blocks(key, parameter_id, blocks, NORMAL_STREAM))
    # Element i of a block is -1 if bit i % 32 of word i // 32 is set, counted from the lowest bit.
    words = torch.stack(words_of_blocks(key, parameter_id, blocks, RADEMACHER_STREAM), -1)
    bits = (words[..., None] >> torch.arange(32, device=blocks.device)) & 1
    return (1 - 2 * bits).flatten(-2).to(torch.float32)


def _minus_two_log_uniform(word: Tensor) -> Tensor:
    """Return -2 ln u in fp32 for u = (2 (word >> 9) + 1) / 2**24, which is never 0 or 1."""
    odd = (((word >> 9) << 1) | 1).to(torch.float32)  # 24 bits: exact
    bits = odd.view(torch.int32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    above = mantissa > _SQRT2
    x = torch.where(above, mantissa * 0.5, mantissa) - 1.0
    exponent = ((bits >> 23) - 127 + above.to(torch.int32) - 24).to(torch.float32)
    polynomial = x * _LOG_COEFFICIENTS[0] + _LOG_COEFFICIENTS[1]
    for coefficient in _LOG_COEFFICIENTS[2:]:
        polynomial = polynomial * x + coefficient
    square = x * x
    tail = polynomial * x * square + exponent * _LN2_LOW - square * 0.5
    return ((x + tail) + exponent * _LN2_HIGH) * -2.0


def _sin_cos(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sine, cosine); the top two bits select the quadrant, the rest an angle in [-pi/4, pi/4)."""
    quadrant = word >> 30
    rest = (word << 2) & _MASK32
    x = (rest - ((rest >> 31) << 32)).to(torch.float32) * _QUARTER_PI_OVER_2_31
    square = x * x
    sine = (square * _SIN_COEFFICIENTS[0] + _SIN_COEFFICIENTS[1]) * square + _SIN_COEFFICIENTS[2]
    sine = sine * square * x + x
    cosine = (square * _COS_COEFFICIENTS[0] + _COS_COEFFICIENTS[1]) * square + _COS_COEFFICIENTS[2]
    cosine = cosine * (square * square) - square * 0.5 + 1.0
    odd = (quadrant & 1) == 1
    sine, cosine = torch.where(odd, cosine, sine), torch.where(odd, sine, cosine)
    sine = torch.where(quadrant >= 2, -sine, sine)
    cosine = torch.where((quadrant == 1) | (quadrant == 2), -cosine, cosine)
    return sine, cosine


def _sqrt(x: Tensor) -> Tensor:
    # PyTorch's eager square root is not correctly rounded on the CPU; NumPy's is.
    if x.device.type == "cpu":
        return torch.from_numpy(np.sqrt(x.numpy()))
    return torch.sqrt(x)


def round_stochastic(values: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to one of the two neighbors in `dtype`; the nearer one is proportionally more likely.

    bf16: the low 16 bits of the dither word are added to the fp32 bits, then the last 16 bits are cut off.
    fp16: if |x| >= 2**-14, the same with 13 bits; otherwise |x| is expressed in units of 2**-44 (truncated),
    the low 20 bits of the word are added, and the last 20 bits are cut off. Infinities and NaN do not change.
    """
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
        rounded = torch.where(
            magnitude < _SMALLEST_NORMAL_FP16, subnormal, normal.clamp(max=0x7C00)
        )
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


def _low_unit_exponent(high: Tensor) -> Tensor:
    """Return the biased fp32 exponent of one unit of `low`, which is 2**-15 of the last place of `high`."""
    exponent = (high.to(torch.float32).view(torch.int32) >> 23) & 0xFF
    return exponent.clamp(min=127 - 14) - 10 - 15


class EagerNoise(NoiseBackend):
    """`NoiseBackend` on any device."""

    def _perturb(
        self,
        weights: Sequence[Weight],
        key: int,
        scale: float,
        num_signs: int,
    ) -> list[list[Tensor]]:
        copies = []
        for theta, parameter_id, out_dtype, rows, region in weights:
            width = 1 if rows is None else theta.shape[1]
            source = theta.reshape(-1, width)
            shape = theta.shape if rows is None else torch.Size((len(rows), width))
            outs = [
                torch.empty(shape, dtype=out_dtype, device=theta.device) for _ in range(num_signs)
            ]
            for first, last in _chunks(
                shape.numel() if rows is None else len(rows), max(1, CHUNK // width)
            ):
                if rows is None:
                    values, where = source[first:last, 0], (region, first, last, theta.device)
                    z = _draw(self.law.entries, key, parameter_id, where)
                else:
                    values, columns = (
                        source[rows[first:last]],
                        torch.arange(width, device=theta.device),
                    )
                    elements = region.start + rows[first:last, None] * width + columns
                    z = draw_at(self.law.entries, key, parameter_id, elements)
                for out, signed in zip(outs, (scale, -scale), strict=False):
                    flat = out.view(-1) if rows is None else out
                    flat[first:last] = values.to(torch.float32) + z * signed
            copies.append(outs)
        return copies

    def update_(
        self,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        for values, region, parameter_id, low in targets:
            dithered = precision == "stochastic" and values.dtype != torch.float32
            for first, last in _chunks(values.numel(), CHUNK):
                part = values[first:last]
                part_low = None if low is None else low[first:last]
                where = (region, first, last, values.device)
                for key, coefficient, factor in updates:
                    z = _draw(self.law.entries, key, parameter_id, where)
                    changed = join_master(part, part_low) * factor - z * coefficient
                    if dithered:
                        words = words_at(key, parameter_id, elements_of(*where), DITHER_STREAM)
                        changed = round_stochastic(changed, words, values.dtype)
                    if part_low is not None:
                        changed, changed_low = split_master(changed, values.dtype)
                        assert changed_low is not None
                        part_low.copy_(changed_low)
                    part.copy_(changed)


def _draw(distribution: Distribution, key: int, parameter_id: int, part: _Part) -> Tensor:
    region, first, last, device = part
    if not region.width:  # no block is drawn twice
        return draw(distribution, key, parameter_id, region.start + first, last - first, device)
    return draw_at(distribution, key, parameter_id, elements_of(*part))


def _chunks(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Split [0, count) into (first, last) ranges of at most `size`."""
    return ((first, min(first + size, count)) for first in range(0, count, size))
