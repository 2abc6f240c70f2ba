"""The shards of one rank: loading, updating, replaying and comparing them without gathering them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.noise import UpdateTarget, noise_backend
from lezo_ds.noise.reference import split_master
from lezo_ds.sharding.files import WeightFiles
from lezo_ds.sharding.integrity import Witness, shard_digest
from lezo_ds.sharding.parameters import ShardedParameter
from lezo_ds.sharding.zero3 import finish_updates
from lezo_ds.zo.laws import PerturbationLaw
from lezo_ds.zo.updates import (
    StepUpdate,
    Update,
    UpdatePrecision,
    updates_of_parameter,
)

_LOW_STREAM = (
    0x80000000  # keeps the digest of the low bits apart from that of the shard they belong to
)


class ShardedWeights:
    """The shards of one rank, and their low bits with `fp32_master`.

    `precision` is how `apply` stores updates; it is None if an optimizer of torch updates the weights instead.
    `aliases` are all names of each parameter, by its first name: tied weights have several. With
    `has_adapter`, the trainable parameters are those of an adapter, which no checkpoint of the model has.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        *,
        aliases: Mapping[str, tuple[str, ...]],
        precision: UpdatePrecision | None,
        has_adapter: bool = False,
    ) -> None:
        self.parameters = parameters
        self.adapter_parameters = [
            p for p in parameters if has_adapter and p.parameter.requires_grad
        ]
        self.base_parameters = [
            p for p in parameters if not (has_adapter and p.parameter.requires_grad)
        ]
        self.stored_parameters = (
            self.adapter_parameters or parameters
        )  # those that a snapshot holds
        self.low_bits: dict[str, Tensor] = {}  # int16, of this rank's shards, by name
        self._initial: list[tuple[ShardedParameter, Tensor, Tensor | None]] = []
        self._aliases = aliases
        self._precision = precision
        trained = (p for p in parameters if p.parameter.requires_grad and p.count)
        self._trained_by_block = [
            (block, list(group))
            for block, group in itertools.groupby(trained, key=lambda p: p.named.block)
        ]

    def load(
        self,
        parameters: Sequence[ShardedParameter],
        files: WeightFiles,
        low_bits: WeightFiles | None,
    ) -> None:
        """Fill shards from files, of which each rank reads its own elements; `low_bits` are a snapshot's."""
        aliases = {parameter.name: self._aliases[parameter.name] for parameter in parameters}
        stored = files.find(aliases, {parameter.name: parameter.shape for parameter in parameters})
        for parameter in parameters:
            part, low = (parameter.region, parameter.count), None
            if low_bits and self._keeps_low_bits(parameter):
                low = low_bits.read((parameter.name,), *part)
            self.fill(parameter, files.read(stored[parameter.name], *part), low)
        finish_updates()

    def fill(self, parameter: ShardedParameter, values: Tensor, low: Tensor | None = None) -> None:
        """Fill one shard with values [count] of any dtype, and its low bits with `low`, int16 [count].

        Without `low`, the bits of `values` that a 16-bit shard cannot hold become its low bits.
        """
        with parameter.shard(write=True) as shard:
            if self._keeps_low_bits(parameter):
                if low is None:
                    values, low = split_master(values.float(), shard.dtype)
                assert low is not None
                self.low_bits[parameter.name] = low.to(shard.device, copy=True)
            shard.copy_(values)

    def keep_initial(self) -> None:
        """Keep a copy of the adapter's shards for `restore_initial`. They are small."""
        for parameter in self.adapter_parameters:
            low = self.low_bits.get(parameter.name)
            with parameter.shard() as shard:
                self._initial.append(
                    (parameter, shard.clone(), None if low is None else low.clone())
                )

    def restore_initial(self) -> None:
        """Set the adapter's shards to the values that `keep_initial` kept."""
        for parameter, values, low in self._initial:
            self.fill(parameter, values, low)
        finish_updates()

    def _keeps_low_bits(self, parameter: ShardedParameter) -> bool:
        tensor = parameter.parameter
        return (
            self._precision == "fp32_master"
            and tensor.dtype != torch.float32
            and tensor.requires_grad
        )

    def apply(self, updates: Sequence[StepUpdate], law: PerturbationLaw) -> None:
        """Apply the updates of steps, in order. One step at a time gives the same bits as many at once."""
        for block, parameters in self._trained_by_block:
            # The parameters of a block have the same updates, apart from the decay.
            matrices, vectors = (
                updates_of_parameter(updates, block, decays=decays) for decays in (True, False)
            )
            if matrices == vectors:
                self._update(parameters, matrices, law)
            else:
                self._update([p for p in parameters if p.decays], matrices, law)
                self._update([p for p in parameters if not p.decays], vectors, law)
        finish_updates()

    def _update(
        self,
        parameters: Iterable[ShardedParameter],
        updates: Sequence[Update],
        law: PerturbationLaw,
    ) -> None:
        """Apply the same updates to the shards of parameters, with one call for those in memory."""
        assert self._precision is not None
        if not updates:
            return
        in_memory: dict[torch.device, list[UpdateTarget]] = {}
        for parameter in parameters:
            opened, low = parameter.shard(write=True), self.low_bits.get(parameter.name)
            with opened as values:
                target = UpdateTarget(values, parameter.region, parameter.named.parameter_id, low)
                if opened.is_swapped:
                    noise = noise_backend(values.device, law)
                    noise.update_([target], updates, self._precision)
                else:
                    in_memory.setdefault(values.device, []).append(target)
        # The backend follows the shards: offloaded ones are updated on the CPU.
        for device, targets in in_memory.items():
            noise_backend(device, law).update_(targets, updates, self._precision)

    def witness(self) -> Witness:
        assert self._precision is not None
        trained = [
            parameter for _, parameters in self._trained_by_block for parameter in parameters
        ]
        return Witness(trained, self.low_bits, self._precision)

    def unlike_replicas(self) -> list[tuple[int, str]]:
        """Return (rank, name) of each shard that differs from its first replica. A collective."""
        num_sharers = distributed.world_size(self.parameters[0].group)
        has_groups = num_sharers < distributed.world_size()
        parameters = [
            parameter for parameter in self.parameters if has_groups or parameter.is_replicated
        ]
        if not parameters:
            return []
        by_rank = distributed.gather_objects(self._shard_digests(parameters))
        return [
            (rank, parameter.name)
            for rank, digests in enumerate(by_rank)
            for index, parameter in enumerate(parameters)
            if digests[index]
            != by_rank[0 if parameter.is_replicated else rank % num_sharers][index]
        ]

    def digests(self, parameters: Sequence[ShardedParameter] | None = None) -> dict[str, int]:
        """Return a digest of each full parameter and its low bits, for any sharding. A collective."""
        parameters = self.parameters if parameters is None else parameters
        is_first = distributed.rank() % distributed.world_size(parameters[0].group) == 0
        own = zip(parameters, self._shard_digests(parameters), strict=True)
        counted = [
            digest if is_first or not parameter.is_replicated else 0 for parameter, digest in own
        ]
        sums = distributed.sum_integers(counted, parameters[0].group)
        return dict(zip((parameter.name for parameter in parameters), sums, strict=True))

    def _shard_digests(self, parameters: Sequence[ShardedParameter]) -> list[int]:
        digests = []
        for parameter in parameters:
            parameter_id, low = parameter.named.parameter_id, self.low_bits.get(parameter.name)
            with parameter.shard() as shard:
                total = shard_digest(shard, parameter.region, parameter_id)
            if low is not None:
                total += shard_digest(low, parameter.region, parameter_id ^ _LOW_STREAM)
            digests.append((total + 2**63) % 2**64 - 2**63)
        return digests

    def digest(self, parameters: Sequence[ShardedParameter] | None = None) -> str:
        """Return one digest of parameters (None: of all), 32 hex digits. A collective."""
        text = ";".join(
            f"{name}:{value}" for name, value in sorted(self.digests(parameters).items())
        )
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def gather_low_bits(self, parameter: ShardedParameter) -> Tensor | None:
        """Return the full low bits of a parameter on the CPU, or None if it has none. A collective."""
        if not self._keeps_low_bits(parameter):
            return None
        return parameter.gather_like(self.low_bits[parameter.name])
