"""Checks of weights: digests that are the same for any sharding, and samples that are replayed.

digest      of all elements    after loading, at snapshots and at the end; between replicas
Witness     of a few elements  between snapshots: on each rank, against a replay of the journal
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from lezo_ds.noise import Elements, Region, Updater, UpdateTarget
from lezo_ds.sharding.shards import Shard
from lezo_ds.zo.updates import StepUpdate, UpdatePrecision, updates_of_parameter

_CHUNK_ON_CPU = 1 << 17  # temporary tensors of 1 MB stay in a processor's cache
_CHUNK = 1 << 22  # an operation on a GPU has a fixed cost
_INDEX_FACTOR = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_STREAM_FACTOR = -4417276706812531889  # 0xC2B2AE3D27D4EB4F
_MIX_FACTOR = -4658895280553007687  # 0xBF58476D1CE4E5B9
_NUM_ELEMENTS = 64  # of a sample


def digest_of(values: Tensor, elements: Elements) -> int:
    """Return the digest of some elements of a parameter: a signed 64-bit integer.

    The digest is the sum of (bit pattern) * (odd pseudo-random number of the element's index)
    modulo 2**64. So the digests of slices add up to that of the parameter, and a change of one
    element always changes it. It detects faults, but does not resist an adversary.

    Args:
        values: [n], of 32 or 16 bits each.
        elements: which they are. Their ids give equal parameters of different names different
            digests.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    chunk = _CHUNK_ON_CPU if values.device.type == "cpu" else _CHUNK
    bits_dtype = torch.int32 if values.element_size() == 4 else torch.int16
    stream = elements.parameter_id * _STREAM_FACTOR % (1 << 63)
    for begin in range(0, values.numel(), chunk):
        bits = values[begin : begin + chunk].view(bits_dtype).to(torch.int64)
        index = elements.region.indices(begin, begin + bits.numel(), values.device)
        # A finalizer like SplitMix64's: neighboring indices get unrelated numbers. Products wrap.
        number = (index + 1) * _INDEX_FACTOR + stream
        number = (number ^ (number >> 31)) * _MIX_FACTOR | 1
        total += (bits * number).sum()
    return int(total)


def apply_updates(
    shards: Mapping[tuple[int, bool], Sequence[Shard]],
    target_of: Callable[[Shard], UpdateTarget],
    updates: Sequence[StepUpdate],
    updater: Updater | None,
    precision: UpdatePrecision | None,
) -> None:
    """Apply the updates of steps, in order, to some elements of each shard.

    Args:
        shards: by block, and by whether weight decay applies: those alike have the same updates.
        target_of: returns the elements of a shard to update. It is asked if there are updates.
        updates: one step at a time gives the same bits as many at once.
        updater: the run's directions. Like `precision`, None only if there are no updates.
        precision: how 16-bit values are stored.
    """
    for (block, decays), alike in shards.items():
        changes = updates_of_parameter(updates, block, decays=decays)
        if changes:
            assert updater is not None and precision is not None
            updater.update([target_of(shard) for shard in alike], changes, precision)


class Witness:
    """Samples of a rank's shards: the first elements of each, which follow the steps.

    `follow` applies the updates of the journal to the samples, `unlike` compares them with the
    shards, to which the steps have applied the same updates. A weight that something else has
    changed is then found, if it is in a sample.
    """

    def __init__(
        self,
        shards: Mapping[tuple[int, bool], Sequence[Shard]],
        target_of: Callable[[Shard], UpdateTarget],
        precision: UpdatePrecision | None,
    ) -> None:
        """Copy one sample of each shard; see `apply_updates` for the arguments."""
        self._shards = shards
        self._target_of = target_of
        self._precision = precision
        self._samples: dict[Shard, UpdateTarget] = {}
        for shard in chain.from_iterable(shards.values()):
            self._samples[shard] = _sample(target_of(shard))

    def follow(self, updates: Sequence[StepUpdate], updater: Updater | None) -> None:
        """Apply the updates of steps to the samples."""
        apply_updates(self._shards, self._samples.__getitem__, updates, updater, self._precision)

    def unlike(self) -> list[str]:
        """Return the names of the parameters whose shards or low bits differ from their samples."""
        names = []
        for shard, sample in self._samples.items():
            present = _sample(self._target_of(shard))
            # As integers: -0.0 equals 0.0, and NaN does not equal itself.
            is_equal = torch.equal(
                sample.values.view(torch.uint8), present.values.view(torch.uint8)
            )
            if sample.low is not None and present.low is not None:
                is_equal &= torch.equal(sample.low, present.low)
            if not is_equal:
                names.append(shard.name)
        return names


def _sample(target: UpdateTarget) -> UpdateTarget:
    """Return a copy of the first elements, which are neighbors in the full parameter."""
    values, elements, low = target
    number = min(_NUM_ELEMENTS, elements.region.width)
    if low is not None:
        low = low[:number].clone()
    first = elements._replace(region=Region.run(elements.region.start, number))
    return UpdateTarget(values[:number].clone(), first, low)
