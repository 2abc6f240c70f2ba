"""Directions of +1 and -1 from the bits of Philox words: the eager reference of every backend.

These are the directions of Spall's own simultaneous perturbations (1992). A block serves 128 elements, where
it serves four normals. The product of theta + scale * z is exact, so that only the sum is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lezo_ds.noise.philox import RADEMACHER_STREAM, words_of_blocks

ELEMENTS_PER_BLOCK = 128


def signs_of_blocks(key: int, parameter_id: int, blocks: Tensor) -> Tensor:
    """Return +1 or -1 for each element: fp32, the shape of `blocks` plus a last axis of 128.

    The arguments are those of `words_of_blocks`; a block is 128 elements. Element i of a block is -1 if bit
    i % 32 of word i // 32 is set, counted from the lowest bit.
    """
    words = torch.stack(words_of_blocks(key, parameter_id, blocks, RADEMACHER_STREAM), -1)
    bits = (words[..., None] >> torch.arange(32, device=blocks.device)) & 1
    return (1 - 2 * bits).flatten(-2).to(torch.float32)
