"""The noise z(key, parameter, element) and the dither in PyTorch: the reference of every backend.

Philox4x32-10, the counter-based generator of Salmon et al. 2011, encrypts the counter (block low word, block
high word, parameter id, stream) with the 64-bit key, and gives four 32-bit words for each block of elements.

Normals are made of them by Box-Muller. Logarithm, sine and cosine are polynomials that use only IEEE fp32
additions, multiplications and square roots, each rounded on its own, so that PyTorch, C++ and Triton produce
the same bits. Fused multiply-adds would give other bits. They were measured: on an H100, 44 instead of 52
instructions an element for a pair of perturbed weights in fp16; on a CPU with AVX-512, 0 to 16 % less time.

Signs, the directions of Spall's simultaneous perturbations (1992), are the bits of the words.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lezo_ds.zo.updates import Distribution

NORMAL_STREAM, DITHER_STREAM, RADEMACHER_STREAM = 0, 1, 2
PER_BLOCK: dict[Distribution, int] = {"normal": 4, "rademacher": 128}

_MASK32 = 0xFFFFFFFF
# Cephes logf: log(1 + x) = x - x**2/2 + x**3 P(x) on [sqrt(1/2) - 1, sqrt(2) - 1], highest power first.
_LOG_COEFFICIENTS = [7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1]
_LOG_COEFFICIENTS += [-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1]
_SQRT2 = 1.4142135381698608
# ln 2 in two parts (Cody and Waite): the high part times a small integer is exact in fp32.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Cephes sinf and cosf on [-pi/4, pi/4], highest power first.
_SIN_COEFFICIENTS = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS_COEFFICIENTS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_QUARTER_PI_OVER_2_31 = 3.657291987e-10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def draw(
    distribution: Distribution, key: int, parameter_id: int, start: int, count: int, device: torch.device
) -> Tensor:
    """Return z of elements [start, start + count) of one parameter: fp32 [count]."""
    per_block = PER_BLOCK[distribution]
    z = _of_blocks(distribution, key, parameter_id, _blocks(start, count, per_block, device))
    return z.reshape(-1)[start % per_block :][:count]


def draw_rows(distribution: Distribution, key: int, parameter_id: int, rows: Tensor, width: int) -> Tensor:
    """Return z of rows of a parameter of that width: fp32 [len(rows), width]."""
    per_block = PER_BLOCK[distribution]
    starts = (rows * width)[:, None]
    num_blocks = (width + 2 * (per_block - 1)) // per_block  # that a row touches at most
    blocks = starts // per_block + torch.arange(num_blocks, device=rows.device)
    z = _of_blocks(distribution, key, parameter_id, blocks).view(len(rows), -1)
    return z.gather(1, starts % per_block + torch.arange(width, device=rows.device))


def dither_words(key: int, parameter_id: int, start: int, count: int, device: torch.device) -> Tensor:
    """Return the dither words of elements [start, start + count): int64 [count], unsigned 32-bit values."""
    words = words_of_blocks(key, parameter_id, _blocks(start, count, 4, device), DITHER_STREAM)
    return torch.stack(words, -1).reshape(-1)[start % 4 :][:count]


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
