"""Standard normals from Philox words by Box-Muller: the eager reference of every backend.

Logarithm, sine and cosine are polynomials. They use only IEEE fp32 additions, multiplications and square
roots, each rounded on its own, so that PyTorch, C++ and Triton produce the same bits.

Fused multiply-adds would give other bits, and a second version of the noise. It was measured and left out.
On an H100, it takes 44 instead of 52 instructions an element for a pair of perturbed weights in fp16, and 60
instead of 67 for an update with low bits. On a CPU with AVX-512, the operations take 0 to 16% less time.
Earlier runs could not be replayed with it, and neither PyTorch nor NumPy has a fused multiply-add on the CPU.
Directions of +1 and -1 (rademacher.py) take 12 and 27 instructions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lezo_ds.noise.philox import MASK32, NORMAL_STREAM, words_of_blocks

ELEMENTS_PER_BLOCK = 4

# Cephes logf: log(1 + x) = x - x**2/2 + x**3 P(x) on [sqrt(1/2) - 1, sqrt(2) - 1], highest power first.
LOG_COEFFICIENTS = (
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
SQRT2 = 1.4142135381698608
# ln 2 in two parts (Cody and Waite): the high part times a small integer is exact in fp32.
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
# Cephes sinf and cosf on [-pi/4, pi/4], highest power first.
SIN_COEFFICIENTS = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COS_COEFFICIENTS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
QUARTER_PI_OVER_2_31 = 3.657291987e-10


def normals_of_blocks(key: int, parameter_id: int, blocks: Tensor) -> Tensor:
    """Return the four standard normals of each block: fp32, the shape of `blocks` plus a last axis of 4.

    The arguments are those of `words_of_blocks`; a block is four elements. By Box-Muller, words 0 and 1 give
    z0 and z1; words 2 and 3 give z2 and z3. |z| is at most sqrt(-2 ln 2**-24) = 5.77.
    """
    return box_muller(*words_of_blocks(key, parameter_id, blocks, NORMAL_STREAM))


def box_muller(word0: Tensor, word1: Tensor, word2: Tensor, word3: Tensor) -> Tensor:
    """Return four standard normals of four words: fp32, the shape of a word plus a last axis of 4.

    The words are int64 with values of unsigned 32 bits.
    """
    radius01 = _sqrt(_minus_two_log_uniform(word0))
    radius23 = _sqrt(_minus_two_log_uniform(word2))
    sin01, cos01 = _sin_cos(word1)
    sin23, cos23 = _sin_cos(word3)
    return torch.stack([radius01 * cos01, radius01 * sin01, radius23 * cos23, radius23 * sin23], -1)


def _minus_two_log_uniform(word: Tensor) -> Tensor:
    """Return -2 ln u in fp32 for u = (2 (word >> 9) + 1) / 2**24, which is never 0 or 1."""
    odd = (((word >> 9) << 1) | 1).to(torch.float32)  # 24 bits: exact
    bits = odd.view(torch.int32)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    above = mantissa > SQRT2
    x = torch.where(above, mantissa * 0.5, mantissa) - 1.0
    exponent = ((bits >> 23) - 127 + above.to(torch.int32) - 24).to(torch.float32)
    polynomial = x * LOG_COEFFICIENTS[0] + LOG_COEFFICIENTS[1]
    for coefficient in LOG_COEFFICIENTS[2:]:
        polynomial = polynomial * x + coefficient
    square = x * x
    tail = polynomial * x * square + exponent * LN2_LOW - square * 0.5
    return ((x + tail) + exponent * LN2_HIGH) * -2.0


def _sin_cos(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sine, cosine); the top two bits select the quadrant, the rest an angle in [-pi/4, pi/4)."""
    quadrant = word >> 30
    rest = (word << 2) & MASK32
    x = (rest - ((rest >> 31) << 32)).to(torch.float32) * QUARTER_PI_OVER_2_31
    square = x * x
    sine = (square * SIN_COEFFICIENTS[0] + SIN_COEFFICIENTS[1]) * square + SIN_COEFFICIENTS[2]
    sine = sine * square * x + x
    cosine = (square * COS_COEFFICIENTS[0] + COS_COEFFICIENTS[1]) * square + COS_COEFFICIENTS[2]
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
