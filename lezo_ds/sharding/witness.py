"""Samples of every trained shard that are replayed from the journal. The shards must equal them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lezo_ds.noise import Shard, noise_backend
from lezo_ds.sharding.zero3 import ShardedParameter
from lezo_ds.zo.updates import Distribution, StepUpdate, UpdatePrecision, updates_of_parameter

_NUM_ELEMENTS = 64


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A copy of some elements of a shard.

    Attributes:
        parameter: the parameter that the shard belongs to.
        begin: index of the first element in the shard.
        values: [n], at most 64 elements.
        low: int16 [n], their low bits. None if the shard has none.
    """

    parameter: ShardedParameter
    begin: int
    values: Tensor
    low: Tensor | None

    @classmethod
    def take(cls, parameter: ShardedParameter, shard: Tensor, low: Tensor | None) -> Sample:
        """Copy elements of a shard, at a position that depends on the parameter's id."""
        begin = parameter.named.parameter_id % max(1, parameter.count - _NUM_ELEMENTS)
        taken = slice(begin, begin + _NUM_ELEMENTS)
        return cls(
            parameter=parameter,
            begin=begin,
            values=shard[taken].clone(),
            low=None if low is None else low[taken].clone(),
        )

    def equals(self, shard: Tensor, low: Tensor | None) -> bool:
        """Return whether the shard and its low bits have the bits of the sample."""
        end = self.begin + len(self.values)
        # Floats would not do: -0.0 equals 0.0, and NaN does not equal itself.
        bits = torch.equal(self.values.view(torch.uint8), shard[self.begin : end].view(torch.uint8))
        return bits and (self.low is None or low is None or torch.equal(self.low, low[self.begin : end]))


class Witness:
    """Samples of a rank's shards that are updated from the journal. `ShardedWeights.witness` makes them.

    Args:
        samples: of the trained shards.
        precision: how updates are stored.
    """

    def __init__(self, samples: Sequence[Sample], precision: UpdatePrecision) -> None:
        self.samples = samples
        self._precision = precision

    def follow(self, updates: Sequence[StepUpdate], distribution: Distribution = "normal") -> None:
        """Apply the updates of steps, whose directions have that distribution, to the samples."""
        for sample in self.samples:
            parameter = sample.parameter
            start, named = parameter.start + sample.begin, parameter.named
            noise_backend(sample.values.device).update_(
                [Shard(sample.values, start, named.parameter_id, sample.low)],
                updates_of_parameter(updates, named.block, decays=parameter.decays),
                self._precision,
                distribution,
            )

    def unlike(self, low_bits: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the parameters whose shards differ from their samples.

        Args:
            low_bits: the low bits of this rank's shards, by parameter name.
        """
        names = []
        for sample in self.samples:
            name = sample.parameter.name
            with sample.parameter.shard() as shard:
                if not sample.equals(shard, low_bits.get(name)):
                    names.append(name)
        return names
