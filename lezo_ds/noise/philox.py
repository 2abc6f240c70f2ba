"""Philox4x32-10, the counter-based generator of Salmon et al. 2011, in PyTorch integers."""

from __future__ import annotations

from torch import Tensor

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
