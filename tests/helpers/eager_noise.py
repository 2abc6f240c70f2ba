"""The noise and its operations in plain PyTorch, written as in docs/file-formats.md.

The kernels for CPUs and GPUs are compared with it bit for bit. Normals are computed by Box-Muller.
Logarithm, sine and cosine are polynomials of IEEE fp32 additions and multiplications, each rounded
on its own; the functions of libraries differ in the last bits.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lezo_ds.noise import UpdateTarget
from lezo_ds.noise.low_bits import split_master
from lezo_ds.noise.philox import (
    CODE_STREAM,
    DITHER_STREAM,
    NORMAL_STREAM,
    PER_BLOCK,
    RADEMACHER_STREAM,
    words_at,
    words_of_blocks,
)
from lezo_ds.zo.laws import Distribution

_MASK32 = 0xFFFFFFFF
# Cephes logf: log(1 + x) = x - x**2/2 + x**3 P(x) on [sqrt(1/2) - 1, sqrt(2) - 1], highest power
# first.
_LOG_COEFFICIENTS = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1),
    *(-1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1),
    *(2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
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


def draw(distribution: Distribution, key: int, parameter_id: int, start: int, count: int) -> Tensor:
    """Return z of elements [start, start + count) of one parameter: fp32 [count]."""
    per_block = PER_BLOCK[distribution]
    first_block = start // per_block
    last_block = (start + count - 1) // per_block
    blocks = torch.arange(first_block, last_block + 1)
    z = _of_blocks(distribution, key, parameter_id, blocks)
    return z.reshape(-1)[start % per_block :][:count]


def draw_at(distribution: Distribution, key: int, parameter_id: int, elements: Tensor) -> Tensor:
    """Return z of some elements of one parameter, int64 of any shape: fp32 of that shape."""
    per_block = PER_BLOCK[distribution]
    z = _of_blocks(distribution, key, parameter_id, elements // per_block)
    return z.gather(-1, (elements % per_block)[..., None])[..., 0]


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
        return box_muller(*words_of_blocks(key, parameter_id, blocks, NORMAL_STREAM).unbind(-1))
    # A set bit stands for -1. The lowest bit of a word comes first.
    words = words_of_blocks(key, parameter_id, blocks, RADEMACHER_STREAM)
    bits = (words[..., None] >> torch.arange(32)) & 1  # [*blocks.shape, 4, 32]
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
    return torch.from_numpy(np.sqrt(x.numpy()))


def round_stochastic(values: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values to one of their two neighbors in `dtype`, at random and without bias.

    The nearer neighbor is proportionally more likely. bf16: the low 16 bits of the dither word are
    added to the fp32 bits, then the last 16 bits are cut off. fp16: if |x| >= 2**-14, the same with
    13 bits; otherwise |x| is expressed in units of 2**-44 (truncated), the low 20 bits of the word
    are added, and the last 20 bits are cut off. Infinities do not change.

    `values` are fp32 of any shape, and `words` their dither words, int64 (see `words_at`).
    """
    bits = _bits(values)
    dither = words.to(torch.int32)
    if dtype == torch.bfloat16:
        rounded = (bits + (dither & 0xFFFF)) >> 16
    else:
        rounded = _fp16_stochastic(values, dither) | ((bits >> 31) << 15)
    stored = rounded.to(torch.int16).view(dtype)
    return stored.masked_fill(values.isnan(), torch.nan)


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


def join_master(high: Tensor, low: Tensor | None) -> Tensor:
    """Return the fp32 values that `split_master` split into (high, low); without low, high."""
    if low is None:
        return high.to(torch.float32)
    if high.dtype == torch.bfloat16:
        high_bits = high.view(torch.int16).to(torch.int32) << 16
        return _from_bits(high_bits + low)
    # One unit of `low` is 2**-15 of the last place of `high`.
    exponent = (_bits(high.to(torch.float32)) >> 23) & 0xFF
    unit = _from_bits((exponent.clamp(min=127 - 14) - 10 - 15) << 23)
    return high.to(torch.float32) + low.to(torch.float32) * unit


def _bits(values: Tensor) -> Tensor:
    """Return the bit patterns of fp32 values as int32."""
    return values.view(torch.int32)


def _from_bits(bits: Tensor) -> Tensor:
    """Return the fp32 values of bit patterns, int32."""
    return bits.view(torch.float32)


def move_codes(target: UpdateTarget, factor: float, delta: Tensor, words: Tensor) -> None:
    """Change codes of 8 bits to those of theta * factor - delta, rounded at random."""
    step, minimum = target.grid.float()[:, torch.arange(target.values.numel()) // 64]
    code = target.values.float()
    change = (code * step + minimum) * (torch.tensor(factor) - 1) - delta
    change = torch.where(step == 0, 0, change / step)
    size = change.abs().where(change.abs() < 256, 256)
    uniform = ((words >> 9) * 2 + 1) / 2**24
    moves = size.floor() + (uniform < size - size.floor())
    moved = torch.where(change < 0, code - moves, code + moves)
    target.values.copy_(moved.clamp(0, 255))


def _store(target, factor, delta, key, precision):
    """Store theta * factor - delta, fp32 [n], as an update does."""
    high, elements, low, grid = target
    if grid is not None:
        indices = elements.region.indices(0, high.numel(), high.device)
        words = words_at(key, elements.parameter_id, indices, CODE_STREAM)
        move_codes(target, factor, delta, words)
        return
    value = join_master(high, low) * factor - delta
    if low is not None:
        value, new_low = split_master(value, high.dtype)
        low.copy_(new_low)
    elif precision == "stochastic" and high.dtype != torch.float32:
        indices = elements.region.indices(0, high.numel(), high.device)
        words = words_at(key, elements.parameter_id, indices, DITHER_STREAM)
        value = round_stochastic(value, words, high.dtype)
    high.copy_(value)


class EagerNoise:
    """What `DenseDirections` do, one copy and one update at a time, on the CPU."""

    def __init__(self, law):
        self.entries = law.entries

    def perturb(self, weights, probes):
        return [[self._copy(weight, probe) for probe in probes] for weight in weights]

    def _copy(self, weight, probe):
        theta, key = weight.theta, probe.key
        if weight.rows is None:
            z = self._draw(key, weight.elements)
        else:
            width = theta.shape[1]
            first_indices = weight.elements.region.start + weight.rows[:, None] * width
            indices = first_indices + torch.arange(width)
            z = draw_at(self.entries, key, weight.elements.parameter_id, indices)
            theta = theta[weight.rows]
        if probe.scale != 0:  # the sum would turn -0.0 + 0.0 into 0.0
            theta = theta.to(torch.float32) + z.view(theta.shape) * probe.scale
        return theta.to(weight.out_dtype)

    def update(self, targets, updates, precision):
        for target in targets:
            for update in updates:
                delta = self._draw(update.key, target.elements) * update.coefficient
                _store(target, update.factor, delta, update.key, precision)

    def _draw(self, key, elements):
        """Return z of some elements: fp32 [number of elements]."""
        parameter_id, _, region = elements
        if region.num_rows == 1:  # no block is drawn twice
            return draw(self.entries, key, parameter_id, region.start, region.size)
        indices = region.indices(0, region.size, torch.device("cpu"))
        return draw_at(self.entries, key, parameter_id, indices)


class EagerLowRankKernels:
    """What `LowRankDirections` ask of kernels, one outer product at a time, on the CPU."""

    def draw(self, entries, parameter_id, keys, region):
        found = []
        for key in keys:
            for row in range(region.num_rows):
                start = region.start + row * region.stride
                found.append(draw(entries, key, parameter_id, start, region.width))
        return torch.stack(found)

    def subtract(self, target, u, b, update, precision):
        high, elements, *_ = target
        own_rows, own_columns = elements.rows_and_columns()
        indices = elements.region.indices(0, high.numel(), high.device)
        rows = indices // elements.shape[1] - own_rows.start
        columns = indices % elements.shape[1] - own_columns.start
        delta = torch.zeros(high.numel())
        for of_rows, of_columns in zip(u, b, strict=True):
            delta = delta + of_rows[rows] * of_columns[columns]
        _store(target, update.factor, delta, update.key, precision)
