"""A digest of weights that is the same for any sharding. It compares runs, ranks and snapshots."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_ON_CPU = 1 << 17  # temporary tensors of 1 MB stay in a processor's cache
_CHUNK = 1 << 22  # an operation on a GPU has a fixed cost
_INDEX_FACTOR = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_STREAM_FACTOR = -4417276706812531889  # 0xC2B2AE3D27D4EB4F
_MIX_FACTOR = -4658895280553007687  # 0xBF58476D1CE4E5B9


def shard_digest(shard: Tensor, start: int, parameter_id: int) -> int:
    """Return the digest of the elements of a parameter from `start`: a signed 64-bit integer.

    The digest is the sum of (bit pattern) * (odd pseudo-random number of the element's index) modulo 2**64.
    So the digests of slices add up to that of the parameter, and a change of one element always changes it.
    It detects faults, but does not resist an adversary. `shard` [n] has 32- or 16-bit elements.
    """
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    chunk = _CHUNK_ON_CPU if shard.device.type == "cpu" else _CHUNK
    for begin in range(0, shard.numel(), chunk):
        values = shard[begin : begin + chunk]
        bits = values.view(torch.int32 if values.element_size() == 4 else torch.int16).to(torch.int64)
        index = torch.arange(start + begin, start + begin + values.numel(), device=shard.device)
        # A finalizer like SplitMix64's: neighboring indices get unrelated numbers. Products wrap.
        number = (index + 1) * _INDEX_FACTOR + parameter_id * _STREAM_FACTOR % (1 << 63)
        number = (number ^ (number >> 31)) * _MIX_FACTOR | 1
        total += (bits * number).sum()
    return int(total)
