"""Checks of weights: digests that are the same for any sharding, and samples that are replayed.

digest      of all elements    after loading, at snapshots and at the end; between replicas
Witness     of a few elements  between snapshots: on each rank, against a replay of the journal
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lezo_ds.noise import Region, Updater, UpdateTarget
from lezo_ds.sharding.shards import Shard
from lezo_ds.zo.updates import StepUpdate, UpdatePrecision, updates_of_parameter

_CHUNK_ON_CPU = 1 << 17  # temporary tensors of 1 MB stay in a processor's cache
_CHUNK = 1 << 22  # an operation on a GPU has a fixed cost
_INDEX_FACTOR = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_STREAM_FACTOR = -4417276706812531889  # 0xC2B2AE3D27D4EB4F
_MIX_FACTOR = -4658895280553007687  # 0xBF58476D1CE4E5B9
_NUM_ELEMENTS = 64  # of a sample


def shard_digest(shard: Tensor, region: Region, parameter_id: int) -> int:
    """Return the digest of a slice or rectangle of a parameter: a signed 64-bit integer.

    The digest is the sum of (bit pattern) * (odd pseudo-random number of the element's index)
    modulo 2**64. So the digests of slices add up to that of the parameter, and a change of one
    element always changes it. It detects faults, but does not resist an adversary.

    Args:
        shard: [n], of 32- or 16-bit elements.
        region: where the elements lie in the full parameter.
        parameter_id: gives equal parameters of different names different digests.
    """
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    chunk = _CHUNK_ON_CPU if shard.device.type == "cpu" else _CHUNK
    bits_dtype = torch.int32 if shard.element_size() == 4 else torch.int16
    for begin in range(0, shard.numel(), chunk):
        values = shard[begin : begin + chunk]
        bits = values.view(bits_dtype).to(torch.int64)
        index = region.elements(begin, begin + values.numel(), shard.device)
        # A finalizer like SplitMix64's: neighboring indices get unrelated numbers. Products wrap.
        number = (index + 1) * _INDEX_FACTOR + parameter_id * _STREAM_FACTOR % (1 << 63)
        number = (number ^ (number >> 31)) * _MIX_FACTOR | 1
        total += (bits * number).sum()
    return int(total)


class Witness:
    """Samples of a rank's shards: the first elements of each.

    `follow` applies the updates of the journal to the samples, `unlike` compares them with the
    shards, to which the steps have applied the same updates. A weight that something else has
    changed is then found, if it is in a sample.
    """

    def __init__(
        self,
        shards: Iterable[Shard],
        low_bits: Mapping[str, Tensor],
        precision: UpdatePrecision | None,
    ) -> None:
        """Copy one sample of each shard; every shard has at least one element."""
        self._low_bits = low_bits
        self._precision = precision
        # A shard, and a copy of its first elements and their low bits, which follows the steps.
        self._samples: list[tuple[Shard, UpdateTarget]] = []
        for shard in shards:
            # In one row, its elements are neighbors in the full parameter.
            _, width, _ = shard.region.rows(shard.count)
            number = min(_NUM_ELEMENTS, width)
            low = low_bits.get(shard.name)
            if low is not None:
                low = low[:number].clone()
            region = Region(shard.region.start)
            sample = shard.stored()[:number].clone()
            copy = UpdateTarget(sample, region, shard.named.parameter_id, low, shard.shape)
            self._samples.append((shard, copy))

    def follow(self, updates: Sequence[StepUpdate], updater: Updater | None) -> None:
        """Apply the updates of steps to the samples."""
        for shard, copy in self._samples:
            changes = updates_of_parameter(updates, shard.named.block, decays=shard.decays)
            if not changes:
                continue
            assert updater is not None and self._precision is not None
            updater.update([copy], changes, self._precision)

    def unlike(self) -> list[str]:
        """Return the names of the parameters whose shards or low bits differ from their samples."""
        names = []
        for shard, copy in self._samples:
            number = copy.values.numel()
            # As integers: -0.0 equals 0.0, and NaN does not equal itself.
            sampled = shard.stored()[:number].view(torch.uint8)
            is_equal = torch.equal(copy.values.view(torch.uint8), sampled)
            if copy.low is not None:
                is_equal &= torch.equal(copy.low, self._low_bits[shard.name][:number])
            if not is_equal:
                names.append(shard.name)
        return names
