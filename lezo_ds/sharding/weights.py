"""The shards of one rank: they are loaded, updated, replayed and compared without a gather.

Two checks show that weights are right:

digest      of all elements    after loading, at snapshots and at the end; between replicas
Witness     of a few elements  between snapshots: on each rank, against a replay of the journal
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.noise import Elements, Region, Updater, UpdateTarget
from lezo_ds.noise.low_bits import split_master
from lezo_ds.sharding.files import NameLists, WeightFiles
from lezo_ds.sharding.shards import Shard
from lezo_ds.sharding.zero3 import finish_updates
from lezo_ds.zo.updates import StepUpdate, UpdatePrecision, updates_of_parameter

LOW_BITS_DIRECTORY = "low_bits"
"""The folder of low bits in a directory of weights."""

WeightChanges = Mapping[str, Callable[[Tensor], Tensor]]
"""(value) -> the value to write instead, by the name of a weight."""

LARGEST_CODE = 255
AT_ENDS_BY_QUANTIZATION = 2 / 64
"""Share of the codes at an end of their grid before the first update."""

_NUM_ELEMENTS = 64
"""Most elements of a sample of `Witness`."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers of as many bytes."""

_CHUNK_ON_CPU = 1 << 17  # temporary tensors of 1 MB stay in a processor's cache
_CHUNK = 1 << 22  # an operation on a GPU has a fixed cost
_INDEX_FACTOR = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_STREAM_FACTOR = -4417276706812531889  # 0xC2B2AE3D27D4EB4F
_MIX_FACTOR = -4658895280553007687  # 0xBF58476D1CE4E5B9

# Keeps the digest of the low bits apart from that of the shard that they belong to.
_LOW_STREAM = 0x80000000


class ShardedWeights:
    """The shards of one rank, and their low bits.

    With `fp32_master`, a trained weight is stored as 16 bits, which modules compute with, and 16
    low bits, which only updates read (`noise.low_bits.split_master`). A trained matrix in 8 bits
    has codes instead.

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
        aliases: NameLists,
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
        self._trained: dict[tuple[int, bool], list[Shard]] = defaultdict(list)
        for shard in shards:
            if shard.is_trained and shard.count:
                alike = self._trained[shard.block, shard.decays]
                alike.append(shard)

    def load(
        self,
        shards: Sequence[Shard],
        files: WeightFiles,
        *,
        keeps_grids: bool = False,
    ) -> None:
        """Fill shards from files, of which each rank reads only its own elements.

        Low bits come from the folder of low bits, if there is one for the dtype of the shards.
        Without them, the bits of `files` that 16-bit shards cannot store become low bits.

        Args:
            shards: some of `self.shards`.
            files: the weights of a checkpoint.
            keeps_grids: whether the codes in the folder of low bits belong to the grids that the
                shards have, as in a snapshot of a run that started from them. Otherwise each
                matrix gets a grid of its own from its values.
        """
        aliases = {shard.name: self.aliases[shard.name] for shard in shards}
        shapes = {shard.name: shard.shape for shard in shards}
        tensors = files.find(aliases, shapes)
        low_files = None
        low_directory = files.directory / LOW_BITS_DIRECTORY
        if low_directory.is_dir():
            low_files = WeightFiles(low_directory)
        for shard in shards:
            region = shard.elements.region
            values = files.read(tensors[shard.name], region)
            low = None
            if low_files is not None and values.dtype == shard.dtype:
                low = self._stored_low(low_files, shard, keeps_grids)
            self.fill(shard, values, low)
            del values  # before the next ones are read
        finish_updates()

    def _stored_low(self, low_files: WeightFiles, shard: Shard, keeps_grids: bool) -> Tensor | None:
        """Read the low bits of a shard, or its codes. The folder may be that of another run."""
        dtype = "I16" if self._has_low_bits(shard) else None
        if keeps_grids and shard.trained_codes() is not None:
            dtype = "U8"
        stored = low_files.tensors.get(shard.name)
        if stored is None or stored.dtype != dtype:
            return None
        return low_files.read([shard.name], shard.elements.region)

    def fill(
        self,
        shard: Shard,
        values: Tensor,
        low: Tensor | None = None,
    ) -> None:
        """Fill one shard, and its low bits if it has some.

        Args:
            shard: one of `self.shards`.
            values: [count], of any dtype.
            low: its low bits, int16 [count], or its codes, uint8 [count]. Without them, the bits of
                `values` that a 16-bit shard cannot store become its low bits.
        """
        codes = shard.trained_codes()
        if codes is not None and low is not None:
            codes.copy_(low)
            return
        if self._has_low_bits(shard):
            if low is None:
                wide = values.float()
                values, low = split_master(wide, shard.dtype)
            self.low_bits[shard.name] = low.to(shard.device, copy=True)
        shard.fill(values)

    def keep_initial(self) -> None:
        """Keep a copy of the adapter's shards for `restore_initial`. They are small."""
        finish_updates()
        for shard in self.adapter_shards:
            values = shard.stored().clone()
            low = self.low_bits.get(shard.name)
            if low is not None:
                low = low.clone()
            self._initial.append((shard, values, low))

    def restore_initial(self) -> None:
        """Set the adapter's shards to the values that `keep_initial` kept."""
        for shard, values, low in self._initial:
            self.fill(shard, values, low)
        finish_updates()

    def _has_low_bits(self, shard: Shard) -> bool:
        if self._precision != "fp32_master" or not shard.is_trained:
            return False
        return shard.dtype != torch.float32 and shard.trained_codes() is None

    def besides_values(self, shard: Shard) -> Tensor | None:
        """Return what else a trained shard stores [count]: codes, low bits, or None.

        Two codes may stand for the same 16-bit value, so the values do not give them.
        """
        codes = shard.trained_codes()
        if codes is not None:
            return codes
        return self.low_bits.get(shard.name)

    def ends_share(self) -> float | None:
        """Return the share of trained codes at an end of their grid. A collective.

        Quantization puts 2 of each 64 there: the smallest and the largest element of a group. More
        than `AT_ENDS_BY_QUANTIZATION` are cut off where their grid ends. None without codes.
        """
        stored = (shard.trained_codes() for shard in self.shards)
        trained = [codes for codes in stored if codes is not None]
        if not trained:
            return None
        counts = torch.zeros(2, dtype=torch.int64, device=distributed.device())
        for codes in trained:
            counts[0] += (codes % LARGEST_CODE == 0).sum()  # 0, or the largest
            counts[1] += codes.numel()
        at_ends, total = distributed.sum_vector(counts, self.shards[0].group)
        return at_ends / total

    def apply(self, updates: Sequence[StepUpdate], updater: Updater | None) -> None:
        """Apply the updates of steps, in order, to all trained shards."""
        self.apply_to(self.target_of, updates, updater)
        finish_updates()

    def apply_to(
        self,
        target_of: Callable[[Shard], UpdateTarget],
        updates: Sequence[StepUpdate],
        updater: Updater | None,
    ) -> None:
        """Apply the updates of steps, in order, to some elements of each trained shard.

        Args:
            target_of: returns the elements of a shard to update. It is asked if there are updates.
            updates: one step at a time gives the same bits as many at once.
            updater: the run's directions, None only if there are no updates.
        """
        for (block, decays), alike in self._trained.items():
            changes = updates_of_parameter(updates, block, decays=decays)
            if changes:
                assert updater is not None and self._precision is not None
                targets = list(map(target_of, alike))
                updater.update(targets, changes, self._precision)

    def target_of(self, shard: Shard) -> UpdateTarget:
        """Return what an update of a shard changes in place."""
        return shard.target(self.low_bits.get(shard.name))

    def witness(self) -> Witness:
        """Return samples of the trained shards as they are now."""
        trained = chain.from_iterable(self._trained.values())
        samples = {shard: _sample(self.target_of(shard)) for shard in trained}
        return Witness(self, samples)

    def unlike_replicas(self) -> list[tuple[int, str]]:
        """Return (rank, name) of each shard that differs from its first replica. A collective.

        Shards of the same elements of a parameter are replicas: those of ranks in different groups,
        and all of a parameter that each rank stores in full.
        """
        group = self.shards[0].group
        has_groups = distributed.world_size(group) < distributed.world_size()
        own: dict[tuple[str, Region], int] = {}
        for shard in self.shards:
            if has_groups or shard.is_replicated:
                own[shard.name, shard.elements.region] = self._digest(shard)
        if not own:
            return []
        first: dict[tuple[str, Region], int] = {}
        unlike = []
        for rank, digests in enumerate(distributed.gather_objects(own)):
            for stored, digest in digests.items():
                if digest != first.setdefault(stored, digest):
                    name, _ = stored
                    unlike.append((rank, name))
        return unlike

    def digest(self, shards: Sequence[Shard] | None = None) -> str:
        """Return one digest of full parameters and their low bits or codes, 32 hex digits.

        A collective. It is the same for any sharding (`digest_of`).

        Args:
            shards: of the parameters; None for all.
        """
        if shards is None:
            shards = self.shards
        group = shards[0].group
        # Of replicas, only that of the first rank of each group counts.
        counts_replicas = distributed.rank() % distributed.world_size(group) == 0
        digests = [0] * len(shards)
        for index, shard in enumerate(shards):
            if counts_replicas or not shard.is_replicated:
                digests[index] = self._digest(shard)
        own = torch.tensor(digests, device=distributed.device())
        sums = distributed.sum_vector(own, group)
        names = [shard.name for shard in shards]
        by_name = sorted(zip(names, sums, strict=True))
        text = ";".join(f"{name}:{total}" for name, total in by_name)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _digest(self, shard: Shard) -> int:
        """Return the digest of a shard and its low bits or codes: a signed 64-bit integer."""
        elements = shard.elements
        total = digest_of(shard.stored(), elements)
        besides = self.besides_values(shard)
        if besides is not None:
            low_id = elements.parameter_id ^ _LOW_STREAM
            total += digest_of(besides, elements._replace(parameter_id=low_id))
        return (total + 2**63) % 2**64 - 2**63


class Witness:
    """Samples of a rank's shards: the first elements of each, which follow the steps.

    `follow` applies the updates of the journal to the samples, `unlike` compares them with the
    shards, to which the steps have applied the same updates. A weight that something else has
    changed is then found, if it is in a sample.
    """

    def __init__(self, weights: ShardedWeights, samples: Mapping[Shard, UpdateTarget]) -> None:
        self._weights = weights
        self._samples = samples

    def follow(self, updates: Sequence[StepUpdate], updater: Updater | None) -> None:
        """Apply the updates of steps to the samples."""
        self._weights.apply_to(self._samples.__getitem__, updates, updater)

    def unlike(self) -> list[str]:
        """Return the names of the parameters whose shards or low bits differ from their samples."""
        names = []
        for shard, sample in self._samples.items():
            present = _sample(self._weights.target_of(shard))
            if not all(map(torch.equal, _bytes_of(sample), _bytes_of(present))):
                names.append(shard.name)
        return names


def _sample(target: UpdateTarget) -> UpdateTarget:
    """Return a copy of the first elements, which are neighbors in the full parameter."""
    values, elements, low, grid = target
    number = min(_NUM_ELEMENTS, elements.region.width)
    first = Region.run(elements.region.start, number)
    if low is not None:
        low = low[:number].clone()
    if grid is not None:
        grid = grid[:, :1].clone(memory_format=torch.contiguous_format)  # a group has as many
    return UpdateTarget(values[:number].clone(), elements._replace(region=first), low, grid)


def _bytes_of(target: UpdateTarget) -> list[Tensor]:
    """Return the values and low bits. As numbers, -0.0 would equal 0.0, and NaN not itself."""
    stored = (target.values, target.low)
    return [each.view(torch.uint8) for each in stored if each is not None]


def digest_of(values: Tensor, elements: Elements) -> int:
    """Return the digest of some elements of a parameter: a signed 64-bit integer.

    The digest is the sum of (bit pattern) * (odd pseudo-random number of the element's index)
    modulo 2**64. So the digests of slices add up to that of the parameter, and a change of one
    element always changes it. It detects faults, but does not resist an adversary.

    Args:
        values: [n], of 32, 16 or 8 bits each.
        elements: which they are. Their ids give equal parameters of different names different
            digests.
    """
    device = values.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    chunk = _CHUNK_ON_CPU if device.type == "cpu" else _CHUNK
    bits_dtype = _BITS[values.element_size()]
    stream = elements.parameter_id * _STREAM_FACTOR % (1 << 63)
    begin = 0
    for part in torch.split(values, chunk):
        end = begin + len(part)
        index = elements.region.indices(begin, end, device)
        # A finalizer like SplitMix64's: neighboring indices get unrelated numbers. Products wrap.
        mixed = (index + 1) * _INDEX_FACTOR + stream
        number = (mixed ^ (mixed >> 31)) * _MIX_FACTOR | 1
        bits = part.view(bits_dtype).to(torch.int64)
        total += (bits * number).sum()
        begin = end
    return int(total)
