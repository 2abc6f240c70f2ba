"""The shards of one rank: they are loaded, updated, replayed and compared without a gather."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.noise import Region, Updater, UpdateTarget
from lezo_ds.noise.low_bits import split_master
from lezo_ds.sharding.files import WeightFiles
from lezo_ds.sharding.integrity import Witness, apply_updates, digest_of
from lezo_ds.sharding.shards import Shard
from lezo_ds.sharding.zero3 import finish_updates
from lezo_ds.zo.updates import StepUpdate, UpdatePrecision

LOW_BITS_DIRECTORY = "low_bits"
"""The folder of low bits in a directory of weights."""

# Keeps the digest of the low bits apart from that of the shard that they belong to.
_LOW_STREAM = 0x80000000


class ShardedWeights:
    """The shards of one rank, and their low bits.

    With `fp32_master`, a trained weight is stored as 16 bits, which modules compute with, and 16
    low bits, which only updates read (`noise.low_bits.split_master`).

    Attributes:
        shards: of all parameters, in the order of the module tree, the same on all ranks.
        adapter_shards: of the adapter's parameters, which are the trained ones; empty without an
            adapter.
        base_shards: of all others, which checkpoints of the model have.
        snapshot_shards: of the parameters that a snapshot stores: the adapter's, or all.
        low_bits: int16 [count] of each shard that has low bits, by name.
        aliases: all names of each parameter, by its first name. Tied weights have several.
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
            precision: how `apply` stores updates; None if there are none, as of weights that are
                only scored, or that an optimizer of torch updates.
            has_adapter: whether the trained parameters are those of an adapter.
        """
        self.shards = shards
        self.adapter_shards = [shard for shard in shards if has_adapter and shard.is_trained]
        self.base_shards = [shard for shard in shards if shard not in self.adapter_shards]
        self.snapshot_shards = self.adapter_shards or shards
        self.low_bits: dict[str, Tensor] = {}
        self._initial: list[tuple[Shard, Tensor, Tensor | None]] = []
        self.aliases = aliases
        self._precision = precision
        # By block, and by whether weight decay applies: all of a list have the same updates.
        self._trained: dict[tuple[int, bool], list[Shard]] = {}
        for shard in shards:
            if shard.is_trained and shard.count:
                self._trained.setdefault((shard.block, shard.decays), []).append(shard)

    def load(self, shards: Sequence[Shard], files: WeightFiles) -> None:
        """Fill shards from files, of which each rank reads only its own elements.

        Low bits come from the folder of low bits, if there is one. Without it, the bits of `files`
        that 16-bit shards cannot store become low bits.

        Args:
            shards: some of `self.shards`.
            files: the weights of a checkpoint.
        """
        aliases = {shard.name: self.aliases[shard.name] for shard in shards}
        shapes = {shard.name: shard.shape for shard in shards}
        tensors = files.find(aliases, shapes)
        low_directory = files.directory / LOW_BITS_DIRECTORY
        low_files = WeightFiles(low_directory) if low_directory.is_dir() else None
        for shard in shards:
            low = None
            if low_files is not None and self._has_low_bits(shard):
                low = low_files.read([shard.name], shard.elements.region)
            # Without a name, the values are gone when the next ones are read.
            self.fill(shard, files.read(tensors[shard.name], shard.elements.region), low)
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
            self.low_bits[shard.name] = low.to(shard.device, copy=True)
        shard.fill(values)

    def keep_initial(self) -> None:
        """Keep a copy of the adapter's shards for `restore_initial`. They are small."""
        finish_updates()
        for shard in self.adapter_shards:
            low = self.low_bits.get(shard.name)
            if low is not None:
                low = low.clone()
            self._initial.append((shard, shard.stored().clone(), low))

    def restore_initial(self) -> None:
        """Set the adapter's shards to the values that `keep_initial` kept."""
        for shard, values, low in self._initial:
            self.fill(shard, values, low)
        finish_updates()

    def _has_low_bits(self, shard: Shard) -> bool:
        is_16_bit = shard.dtype != torch.float32
        return self._precision == "fp32_master" and is_16_bit and shard.is_trained

    def apply(self, updates: Sequence[StepUpdate], updater: Updater | None) -> None:
        """Apply the updates of steps, in order, to all trained shards."""
        apply_updates(self._trained, self._target_of, updates, updater, self._precision)
        finish_updates()

    def _target_of(self, shard: Shard) -> UpdateTarget:
        return UpdateTarget(shard.stored(), shard.elements, self.low_bits.get(shard.name))

    def witness(self) -> Witness:
        """Return samples of the trained shards as they are now."""
        return Witness(self._trained, self._target_of, self._precision)

    def unlike_replicas(self) -> list[tuple[int, str]]:
        """Return (rank, name) of each shard that differs from its first replica. A collective.

        Shards of the same elements of a parameter are replicas: those of ranks in different groups,
        and all of a parameter that each rank stores in full.
        """
        has_groups = distributed.world_size(self.shards[0].group) < distributed.world_size()
        compared = [shard for shard in self.shards if has_groups or shard.is_replicated]
        if not compared:
            return []
        stored = [(shard.name, shard.elements.region) for shard in compared]
        own = dict(zip(stored, self._digests(compared), strict=True))
        first: dict[tuple[str, Region], int] = {}
        unlike = []
        for rank, digests in enumerate(distributed.gather_objects(own)):
            for (name, region), digest in digests.items():
                if digest != first.setdefault((name, region), digest):
                    unlike.append((rank, name))
        return unlike

    def digest(self, shards: Sequence[Shard] | None = None) -> str:
        """Return one digest of full parameters and their low bits, 32 hex digits. A collective.

        It is the same for any sharding (`digest_of`).

        Args:
            shards: of the parameters; None for all.
        """
        if shards is None:
            shards = self.shards
        group = shards[0].group
        digests = self._digests(shards)
        if distributed.rank() % distributed.world_size(group) != 0:
            # Of replicas, only that of the first rank of each group counts.
            for index, shard in enumerate(shards):
                if shard.is_replicated:
                    digests[index] = 0
        sums = distributed.sum_vector(torch.tensor(digests, device=distributed.device()), group)
        by_name = sorted(zip([shard.name for shard in shards], sums, strict=True))
        text = ";".join(f"{name}:{total}" for name, total in by_name)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _digests(self, shards: Sequence[Shard]) -> list[int]:
        """Return the digest of each shard and its low bits: signed 64-bit integers."""
        digests = []
        for shard in shards:
            elements = shard.elements
            total = digest_of(shard.stored(), elements)
            low = self.low_bits.get(shard.name)
            if low is not None:
                low_id = elements.parameter_id ^ _LOW_STREAM
                total += digest_of(low, elements._replace(parameter_id=low_id))
            digests.append((total + 2**63) % 2**64 - 2**63)
        return digests
