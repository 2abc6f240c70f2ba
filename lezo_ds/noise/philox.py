"""Philox4x32-10, the counter-based generator of Salmon et al. 2011, in PyTorch integers.

With

    key     = (low word, high word) of the 64-bit key
    counter = (block low word, block high word, parameter id, stream)

it gives four 32-bit words per block.
"""

from __future__ import annotations

import torch
from torch import Tensor

NORMAL_STREAM = 0
DITHER_STREAM = 1
RADEMACHER_STREAM = 2

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32_10(counter: Words, key: tuple[int, int]) -> Words:
    """Encrypt a 128-bit counter with a 64-bit key (Salmon et al. 2011, section 3.3).

    Args:
        counter: four int64 tensors that broadcast together, each value an unsigned 32-bit word.
        key: two unsigned 32-bit words.

    Returns:
        Four int64 tensors of unsigned 32-bit words, in the broadcast shape.

    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # Signed products wrap modulo 2**64 and >> copies the sign; after the masks both halves are exact.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & MASK32) ^ c1 ^ k0,
            product1 & MASK32,
            ((product0 >> 32) & MASK32) ^ c3 ^ k1,
            product0 & MASK32,
        )
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & MASK32, (k1 + KEY_INCREMENTS[1]) & MASK32
    return c0, c1, c2, c3


def words_of_blocks(key: int, parameter_id: int, blocks: Tensor, stream: int) -> Words:
    """Return the four Philox words of each block.

    Args:
        key: unsigned 64-bit key of the noise.
        parameter_id: unsigned 32-bit id, the third counter word.
        blocks: int64 block indices, any shape, 0 to 2**63 - 1.
        stream: `NORMAL_STREAM`, `DITHER_STREAM` or `RADEMACHER_STREAM`, the fourth counter word.

    Returns:
        Four int64 tensors of unsigned 32-bit words in the shape of `blocks`.

    """
    zero = torch.zeros((), dtype=torch.int64, device=blocks.device)
    counter = (blocks & MASK32, (blocks >> 32) & MASK32, zero + parameter_id, zero + stream)
    return philox4x32_10(counter, (key & MASK32, key >> 32))
