"""The random words that all noise is made of: Philox4x32-10 (Salmon et al. 2011), in PyTorch.

    counter   c0 c1 = low and high word of the block's index,  c2 = parameter id,  c3 = stream
              |
              |  encrypted with the 64-bit key
              v
    words     w0 w1 w2 w3, 32 bits each, for each block
              stream 0: 4 normals, elements 4b to 4b + 3 of block b
              stream 1: 4 dither words, by which elements 4b to 4b + 3 are rounded
              stream 2: 128 signs; bit i of word j is that of element 128b + 32j + i
              stream 3: 4 words, by which the codes of elements 4b to 4b + 3 are rounded

The kernels for CPUs and GPUs compute the same words faster. This program gives what needs them but
once, such as the start of an adapter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lezo_ds.zo.laws import Distribution

NORMAL_STREAM = 0
DITHER_STREAM = 1
RADEMACHER_STREAM = 2
CODE_STREAM = 3
PER_BLOCK: dict[Distribution, int] = {"normal": 4, "rademacher": 128}
"""Number of elements whose entries one block of words gives."""

_MASK32 = 0xFFFFFFFF


def words_at(key: int, parameter_id: int, elements: Tensor, stream: int) -> Tensor:
    """Return a word for each of some elements: int64 of their shape, unsigned 32-bit values.

    Args:
        key: unsigned 64-bit.
        parameter_id: unsigned 32-bit.
        elements: int64, indices in the parameter, of any shape.
        stream: 0, 1 or 3, in which a block has one word for each of its elements.
    """
    words = words_of_blocks(key, parameter_id, elements // 4, stream)
    return words.gather(-1, (elements % 4)[..., None])[..., 0]


def words_of_blocks(key: int, parameter_id: int, blocks: Tensor, stream: int) -> Tensor:
    """Return the four words of each block (int64) of a stream: int64 [*blocks.shape, 4].

    Source: Salmon et al. 2011, section 3.3.
    """
    c0 = blocks & _MASK32
    c1 = (blocks >> 32) & _MASK32
    c2 = torch.full_like(blocks, parameter_id)
    c3 = torch.full_like(blocks, stream)
    k0 = key & _MASK32
    k1 = key >> 32
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
    return torch.stack([c0, c1, c2, c3], dim=-1)
