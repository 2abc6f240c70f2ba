"""The shards of one rank: they are loaded, updated, replayed and compared without a gather."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.noise import UpdateTarget, noise_backend
from lezo_ds.noise.reference import split_master
from lezo_ds.sharding.files import WeightFiles
from lezo_ds.sharding.integrity import Witness, shard_digest
from lezo_ds.sharding.shards import Shard
from lezo_ds.sharding.zero3 import finish_updates
from lezo_ds.zo.laws import PerturbationLaw
from lezo_ds.zo.updates import StepUpdate, Update, UpdatePrecision, updates_of_parameter

# Keeps the digest of the low bits apart from that of the shard that they belong to.
_LOW_STREAM = 0x80000000


class _Initial(NamedTuple):
    """A copy of a shard before the first update."""

    shard: Shard
    values: Tensor
    low: Tensor | None


class ShardedWeights:
    """The shards of one rank, and their low bits.

    With `fp32_master`, a trained weight is stored as 16 bits, which modules compute with, and 16
    low bits, which only updates read (`noise.reference.split_master`).

    Attributes:
        shards: of all parameters, in the order of the module tree, the same on all ranks.
        adapter_shards: of the adapter's parameters, which are the trained ones; empty without an
            adapter.
        base_shards: of all others, which checkpoints of the model have.
        snapshot_shards: of the parameters that a snapshot stores: the adapter's, or all.
        low_bits: int16 [count] of each shard that has low bits, by name.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        aliases: Mapping[str, tuple[str, ...]],
        precision: UpdatePrecision | None,
        has_adapter: bool = False,
    ) -> None:
        """Take shards without values.

        Args:
            shards: of all parameters.
            aliases: all names of each parameter, by its first name. Tied weights have several.
            precision: how `apply` stores updates; None if an optimizer of torch updates the weights
                instead.
            has_adapter: whether the trained parameters are those of an adapter.
        """
        self.shards = shards
        self.adapter_shards: list[Shard] = []
        self.base_shards: list[Shard] = []
        for shard in shards:
            if has_adapter and shard.is_trained:
                self.adapter_shards.append(shard)
            else:
                self.base_shards.append(shard)
        self.snapshot_shards = self.adapter_shards or shards
        self.low_bits: dict[str, Tensor] = {}
        self._initial: list[_Initial] = []
        self._aliases = aliases
        self._precision = precision
        self._trained_by_block: dict[int, list[Shard]] = {}
        for shard in shards:
            if shard.is_trained and shard.count:
                self._trained_by_block.setdefault(shard.named.block, []).append(shard)

    def load(
        self, shards: Sequence[Shard], files: WeightFiles, low_files: WeightFiles | None
    ) -> None:
        """Fill shards from files, of which each rank reads only its own elements.

        Args:
            shards: some of `self.shards`.
            files: the weights of a checkpoint.
            low_files: the low bits of a snapshot. Without them, the bits of `files` that 16-bit
                shards cannot store become low bits.
        """
        aliases = {shard.name: self._aliases[shard.name] for shard in shards}
        shapes = {shard.name: shard.shape for shard in shards}
        tensors = files.find(aliases, shapes)
        for shard in shards:
            low = None
            if low_files is not None and self._has_low_bits(shard):
                low = low_files.read((shard.name,), shard.region, shard.count)
            values = files.read(tensors[shard.name], shard.region, shard.count)
            self.fill(shard, values, low)
        finish_updates()

    def fill(self, shard: Shard, values: Tensor, low: Tensor | None = None) -> None:
        """Fill one shard, and its low bits if it has some.

        Args:
            shard: one of `self.shards`.
            values: [count], of any dtype.
            low: its low bits, int16 [count]. Without them, the bits of `values` that a 16-bit shard
                cannot store become its low bits.
        """
        if self._has_low_bits(shard):
            if low is None:
                values, low = split_master(values.float(), shard.dtype)
            assert low is not None, "a 16-bit shard has low bits"
            self.low_bits[shard.name] = low.to(shard.device, copy=True)
        shard.fill(values)

    def keep_initial(self) -> None:
        """Keep a copy of the adapter's shards for `restore_initial`. They are small."""
        for shard in self.adapter_shards:
            low = self.low_bits.get(shard.name)
            if low is not None:
                low = low.clone()
            with shard.open() as stored:
                self._initial.append(_Initial(shard, stored.clone(), low))

    def restore_initial(self) -> None:
        """Set the adapter's shards to the values that `keep_initial` kept."""
        for shard, values, low in self._initial:
            self.fill(shard, values, low)
        finish_updates()

    def _has_low_bits(self, shard: Shard) -> bool:
        is_16_bit = shard.dtype != torch.float32
        return self._precision == "fp32_master" and is_16_bit and shard.is_trained

    def apply(self, updates: Sequence[StepUpdate], law: PerturbationLaw) -> None:
        """Apply the updates of steps, in order.

        One step at a time gives the same bits as many at once.
        """
        for block, shards in self._trained_by_block.items():
            # The parameters of a block have the same updates, apart from the decay.
            of_matrices = updates_of_parameter(updates, block, decays=True)
            of_vectors = updates_of_parameter(updates, block, decays=False)
            if of_matrices == of_vectors:
                self._update(shards, of_matrices, law)
            else:
                matrices = [shard for shard in shards if shard.decays]
                vectors = [shard for shard in shards if not shard.decays]
                self._update(matrices, of_matrices, law)
                self._update(vectors, of_vectors, law)
        finish_updates()

    def _update(
        self, shards: Sequence[Shard], updates: Sequence[Update], law: PerturbationLaw
    ) -> None:
        """Apply the same updates to shards, with one call for all in the memory of a device."""
        assert self._precision is not None
        if not updates:
            return
        in_memory: dict[torch.device, list[UpdateTarget]] = {}
        for shard in shards:
            low = self.low_bits.get(shard.name)
            stays_in_memory = shard.is_in_memory  # in the context, every shard is in memory
            with shard.open(write=True) as stored:
                target = UpdateTarget(stored, shard.region, shard.named.parameter_id, low)
                if stays_in_memory:
                    in_memory.setdefault(stored.device, []).append(target)
                else:
                    noise = noise_backend(stored.device, law)
                    noise.update_([target], updates, self._precision)
        # The backend follows the shards: offloaded ones are updated on the CPU.
        for device, targets in in_memory.items():
            noise_backend(device, law).update_(targets, updates, self._precision)

    def witness(self) -> Witness:
        """Return samples of the trained shards as they are now."""
        assert self._precision is not None
        trained: list[Shard] = []
        for shards in self._trained_by_block.values():
            trained += shards
        return Witness(trained, self.low_bits, self._precision)

    def unlike_replicas(self) -> list[tuple[int, str]]:
        """Return (rank, name) of each shard that differs from its first replica. A collective.

        Ranks at the same position of different groups store the same elements. Of a parameter that
        is replicated, all ranks do.
        """
        group_size = distributed.world_size(self.shards[0].group)
        has_groups = group_size < distributed.world_size()
        compared = [shard for shard in self.shards if has_groups or shard.is_replicated]
        if not compared:
            return []
        by_rank = distributed.gather_objects(self._shard_digests(compared))
        unlike = []
        for rank, digests in enumerate(by_rank):
            for index, shard in enumerate(compared):
                first = 0 if shard.is_replicated else rank % group_size
                if digests[index] != by_rank[first][index]:
                    unlike.append((rank, shard.name))
        return unlike

    def digests(self, shards: Sequence[Shard] | None = None) -> dict[str, int]:
        """Return a digest of each full parameter and its low bits, by name. A collective.

        The digests are the same for any sharding (`shard_digest`).

        Args:
            shards: of the parameters; None for all.
        """
        if shards is None:
            shards = self.shards
        group = shards[0].group
        counted = self._shard_digests(shards)
        if distributed.rank() % distributed.world_size(group) != 0:
            # Of replicas, only that of the first rank of each group counts.
            for index, shard in enumerate(shards):
                if shard.is_replicated:
                    counted[index] = 0
        sums = distributed.sum_integers(counted, group)
        names = [shard.name for shard in shards]
        return dict(zip(names, sums, strict=True))

    def _shard_digests(self, shards: Sequence[Shard]) -> list[int]:
        """Return the digest of each shard and its low bits: signed 64-bit integers."""
        digests = []
        for shard in shards:
            parameter_id = shard.named.parameter_id
            with shard.open() as stored:
                total = shard_digest(stored, shard.region, parameter_id)
            low = self.low_bits.get(shard.name)
            if low is not None:
                total += shard_digest(low, shard.region, parameter_id ^ _LOW_STREAM)
            digests.append((total + 2**63) % 2**64 - 2**63)
        return digests

    def digest(self, shards: Sequence[Shard] | None = None) -> str:
        """Return one digest of full parameters (None: of all), 32 hex digits. A collective."""
        digests = self.digests(shards)
        lines = ";".join(f"{name}:{digests[name]}" for name in sorted(digests))
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()

    def gather_low_bits(self, shard: Shard) -> Tensor | None:
        """Return all low bits of a parameter, int16 [*shape], or None. A collective."""
        if not self._has_low_bits(shard):
            return None
        return shard.gather_like(self.low_bits[shard.name])
