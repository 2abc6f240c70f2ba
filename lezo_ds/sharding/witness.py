"""A few elements of every shard, replayed from the journal beside the real ones: they must stay equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lezo_ds.engine.step_plan import updates_of
from lezo_ds.journal import StepRecord
from lezo_ds.noise import NoiseMode, UpdatePrecision, noise_backend
from lezo_ds.sharding.zero3 import ShardedParameter

_NUM_ELEMENTS = 64


@dataclass(frozen=True)
class Sample:
    """A copy of some elements of a shard.

    Attributes:
        parameter: whose shard it is.
        begin: index of the first element in the shard.
        values: [n], at most 64.
        low: int16 [n], their low bits, if they have any.
    """

    parameter: ShardedParameter
    begin: int
    values: Tensor
    low: Tensor | None

    @classmethod
    def take(cls, parameter: ShardedParameter, shard: Tensor, low: Tensor | None) -> Sample:
        """Copy elements of a shard; which ones differs from parameter to parameter."""
        begin = parameter.named.parameter_id % max(1, parameter.count - _NUM_ELEMENTS)
        end = begin + _NUM_ELEMENTS
        return cls(
            parameter, begin, shard[begin:end].clone(), None if low is None else low[begin:end].clone()
        )

    def equals(self, shard: Tensor, low: Tensor | None) -> bool:
        """Return whether a shard, and its low bits, have these bits."""
        end = self.begin + len(self.values)
        bits = torch.equal(self.values.view(torch.uint8), shard[self.begin : end].view(torch.uint8))
        return bits and (self.low is None or low is None or torch.equal(self.low, low[self.begin : end]))


class Witness:
    """Samples of a rank's shards that follow the journal by themselves; made by `ShardedWeights.witness`."""

    def __init__(self, samples: Sequence[Sample], precision: UpdatePrecision, noise: NoiseMode) -> None:
        self.samples = samples
        self._precision = precision
        self._noise: NoiseMode = noise

    def follow(self, records: Iterable[StepRecord]) -> None:
        """Replay steps on the samples."""
        applied = [record for record in records if record.applied]
        for sample in self.samples:
            named, start = sample.parameter.named, sample.parameter.start + sample.begin
            if steps := updates_of(named.block, applied):
                noise_backend(sample.values.device, self._noise).update_many_(
                    sample.values, start, named.parameter_id, steps, self._precision, sample.low
                )

    def unlike(self, low_bits: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the parameters whose shards differ from their samples.

        Args:
            low_bits: by parameter name, those of this rank's shards.
        """
        names = []
        for sample in self.samples:
            name = sample.parameter.name
            with sample.parameter.shard() as shard:
                if not sample.equals(shard, low_bits.get(name)):
                    names.append(name)
        return names
