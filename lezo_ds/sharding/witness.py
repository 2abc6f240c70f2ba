"""Samples of every trained shard that are replayed from the journal. The shards must equal them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lezo_ds.noise import Shard, noise_backend
from lezo_ds.sharding.parameters import ShardedParameter
from lezo_ds.zo.updates import Distribution, StepUpdate, UpdatePrecision, updates_of_parameter

_NUM_ELEMENTS = 64


class _Sample(NamedTuple):
    parameter: ShardedParameter
    elements: slice
    copy: Shard  # of the elements and of their low bits


class Witness:
    """Samples of a rank's shards, at positions that depend on the parameters' ids."""

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        low_bits: Mapping[str, Tensor],
        precision: UpdatePrecision,
    ) -> None:
        self._precision = precision
        self._samples = []
        for parameter in parameters:
            parameter_id, low = parameter.named.parameter_id, low_bits.get(parameter.name)
            begin = parameter_id % max(1, parameter.count - _NUM_ELEMENTS)
            elements = slice(begin, begin + _NUM_ELEMENTS)
            low = None if low is None else low[elements].clone()
            with parameter.shard() as shard:
                copy = Shard(shard[elements].clone(), parameter.start + begin, parameter_id, low)
            self._samples.append(_Sample(parameter, elements, copy))

    def follow(self, updates: Sequence[StepUpdate], distribution: Distribution = "normal") -> None:
        for parameter, _, copy in self._samples:
            changes = updates_of_parameter(updates, parameter.named.block, decays=parameter.decays)
            backend = noise_backend(copy.values.device)
            backend.update_([copy], changes, self._precision, distribution)

    def unlike(self, low_bits: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the parameters whose shards or low bits differ from their samples."""
        names = []
        for parameter, elements, copy in self._samples:
            with parameter.shard() as shard:
                is_equal = _same_bits(copy.values, shard[elements])
            if copy.low is not None:
                is_equal &= torch.equal(copy.low, low_bits[parameter.name][elements])
            if not is_equal:
                names.append(parameter.name)
        return names


def _same_bits(left: Tensor, right: Tensor) -> bool:
    # Not of floats: -0.0 equals 0.0, and NaN does not equal itself.
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
