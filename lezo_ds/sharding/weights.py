"""The shards of one rank: loading, updating, replaying and comparing them without gathering them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.errors import UserError
from lezo_ds.noise import Shard, noise_backend
from lezo_ds.noise.reference import split_master
from lezo_ds.sharding import zero3
from lezo_ds.sharding.checkpoint_files import WeightFiles
from lezo_ds.sharding.digest import shard_digest
from lezo_ds.sharding.witness import Sample, Witness
from lezo_ds.sharding.zero3 import ShardedParameter
from lezo_ds.zo.updates import Distribution, StepUpdate, Update, UpdatePrecision, updates_of_parameter

_LOW_STREAM = 0x80000000  # keeps the digest of the low bits apart from that of the shard they belong to


class ShardedWeights:
    """The shards of one rank, and their low bits with `fp32_master`.

    Args:
        parameters: all parameters of the model.
        aliases: all names of each parameter, by its first name (tied weights have several).
        precision: how updates are stored (see lezo_ds.noise.reference).
        has_adapter: whether the trainable parameters are those of an adapter. A checkpoint of the model does
            not hold them.

    Attributes:
        base_parameters: the parameters that a checkpoint of the model holds.
        adapter_parameters: the parameters of the adapter. The list is empty without one.
        low_bits: the low bits of this rank's shards, by parameter name.
    """

    def __init__(
        self,
        parameters: Sequence[ShardedParameter],
        *,
        aliases: Mapping[str, tuple[str, ...]],
        precision: UpdatePrecision,
        has_adapter: bool = False,
    ) -> None:
        self.parameters = parameters
        self.adapter_parameters = [p for p in parameters if has_adapter and p.parameter.requires_grad]
        self.base_parameters = [p for p in parameters if not (has_adapter and p.parameter.requires_grad)]
        self._aliases = aliases
        self._precision = precision
        self.low_bits: dict[str, Tensor] = {}
        self._initial: list[tuple[ShardedParameter, Tensor, Tensor | None]] = []
        trained = (p for p in parameters if p.parameter.requires_grad and p.count)
        self._trained_by_block = [
            (block, list(group)) for block, group in itertools.groupby(trained, key=lambda p: p.named.block)
        ]

    @property
    def stored_parameters(self) -> Sequence[ShardedParameter]:
        """The parameters that a snapshot holds: those of the adapter, or all."""
        return self.adapter_parameters or self.parameters

    def load(
        self,
        parameters: Sequence[ShardedParameter],
        files: WeightFiles,
        low_bits: WeightFiles | None = None,
    ) -> None:
        """Fill shards from files. Each rank reads only its own elements of every tensor.

        Args:
            parameters: the parameters to fill.
            files: hold their tensors. If a tensor is wider than its 16-bit shard, the rest of its bits become
                the low bits.
            low_bits: hold the low bits of a snapshot, if it has any.

        Raises:
            UserError: a tensor is missing or has another shape.
        """
        stored = files.find({parameter.name: self._aliases[parameter.name] for parameter in parameters})
        for parameter in parameters:
            source = stored[parameter.name]
            if files.parameter_shape(source) != parameter.shape:
                raise UserError(
                    f"tensor {source.tensors[0]} of the checkpoint does not fit the model",
                    got=str(files.parameter_shape(source)),
                    expected=str(parameter.shape),
                    fix="use a checkpoint that belongs to the config.json",
                )
            end = parameter.start + parameter.count
            values = files.read_parameter(source, parameter.start, end) if parameter.count else torch.empty(0)
            low = None
            if low_bits and parameter.count and self._keeps_low_bits(parameter):
                low = low_bits.read_range(parameter.name, parameter.start, end)
            self.fill(parameter, values, low)
            # The files are memory-mapped: pages that were read count as this process's memory until the file
            # is closed. The next read opens it again.
            files.close()
            if low_bits is not None:
                low_bits.close()
        zero3.finish_updates()

    def fill(self, parameter: ShardedParameter, values: Tensor, low: Tensor | None = None) -> None:
        """Fill one shard.

        Args:
            parameter: the parameter that the shard belongs to.
            values: [count], of any dtype. Without `low`, bits that a 16-bit shard cannot hold become its low
                bits.
            low: int16 [count], the low bits of `values`.
        """
        dtype = parameter.parameter.dtype
        with parameter.shard(write=True) as shard:
            if self._keeps_low_bits(parameter):
                if low is None:
                    values, low = split_master(values.float(), dtype)
                assert low is not None, "a 16-bit shard has low bits"
                self.low_bits[parameter.name] = low.to(shard.device)
            shard.copy_(values)

    def keep_initial(self) -> None:
        """Keep a copy of the adapter's shards for `restore_initial`. They are small."""
        for parameter in self.adapter_parameters:
            low = self.low_bits.get(parameter.name)
            with parameter.shard() as shard:
                self._initial.append((parameter, shard.clone(), None if low is None else low.clone()))

    def restore_initial(self) -> None:
        """Set the adapter's shards to the values that `keep_initial` kept."""
        for parameter, values, low in self._initial:
            self.fill(parameter, values, None if low is None else low.clone())
        zero3.finish_updates()

    def _keeps_low_bits(self, parameter: ShardedParameter) -> bool:
        tensor = parameter.parameter
        return self._precision == "fp32_master" and tensor.dtype != torch.float32 and tensor.requires_grad

    def apply(self, updates: Sequence[StepUpdate], distribution: Distribution = "normal") -> None:
        """Apply the updates of steps, in order.

        Training applies one step at a time, and a replay applies many at once. Both give the same bits.

        Args:
            updates: what the steps do.
            distribution: of the steps' directions.
        """
        for block, parameters in self._trained_by_block:
            # The parameters of a block have the same updates, apart from the decay.
            matrices, vectors = (
                updates_of_parameter(updates, block, decays=decays) for decays in (True, False)
            )
            if matrices == vectors:
                self._update(parameters, matrices, distribution)
            else:
                self._update([p for p in parameters if p.decays], matrices, distribution)
                self._update([p for p in parameters if not p.decays], vectors, distribution)
        zero3.finish_updates()

    def _update(
        self, parameters: Iterable[ShardedParameter], steps: Sequence[Update], distribution: Distribution
    ) -> None:
        """Apply the same updates to the shards of parameters, with one call for those in memory."""
        if not steps:
            return
        in_memory: dict[torch.device, list[Shard]] = {}
        for parameter in parameters:
            named, low = parameter.named, self.low_bits.get(parameter.name)
            values = parameter.shard_in_memory
            if values is not None:
                shard = Shard(values, parameter.start, named.parameter_id, low)
                in_memory.setdefault(values.device, []).append(shard)
                continue
            with parameter.shard(write=True) as values:
                shard = Shard(values, parameter.start, named.parameter_id, low)
                noise = noise_backend(values.device)
                noise.update_([shard], steps, self._precision, distribution)
        # The backend follows the shards: offloaded ones are updated on the CPU.
        for device, shards in in_memory.items():
            noise_backend(device).update_(shards, steps, self._precision, distribution)

    def unlike_replicas(self) -> list[tuple[int, str]]:
        """Return (rank, name) of each shard that differs from the same shard in the first shard group.

        A collective: every rank gets all pairs. Digests cover all bits of the shards and of their low bits.
        """
        num_sharers = distributed.world_size(self.parameters[0].group)
        if num_sharers == distributed.world_size():
            return []
        by_rank = distributed.gather_integers(self._shard_digests(self.parameters))
        names = [parameter.name for parameter in self.parameters]
        return [
            (rank, name)
            for rank, mine in enumerate(by_rank)
            for name, own, first in zip(names, mine, by_rank[rank % num_sharers], strict=True)
            if own != first
        ]

    def witness(self) -> Witness:
        """Return samples of each trained shard, which a replay updates."""
        samples = []
        for parameter in self.parameters:
            if parameter.parameter.requires_grad and parameter.count:
                with parameter.shard() as shard:
                    samples.append(Sample.take(parameter, shard, self.low_bits.get(parameter.name)))
        return Witness(samples, self._precision)

    def digests(self, parameters: Sequence[ShardedParameter] | None = None) -> dict[str, int]:
        """Return a digest of each full parameter and its low bits. A collective; the same for any sharding.

        Args:
            parameters: the parameters to digest. None digests all.
        """
        parameters = self.parameters if parameters is None else parameters
        local = self._shard_digests(parameters)
        names = [parameter.name for parameter in parameters]
        return dict(zip(names, distributed.sum_integers(local, parameters[0].group), strict=True))

    def _shard_digests(self, parameters: Sequence[ShardedParameter]) -> list[int]:
        """Return a digest of each of this rank's shards and its low bits: signed 64-bit integers."""
        local = []
        for parameter in parameters:
            with parameter.shard() as shard:
                total = shard_digest(shard, parameter.start, parameter.named.parameter_id)
            if parameter.name in self.low_bits:
                low = self.low_bits[parameter.name]
                total += shard_digest(low, parameter.start, parameter.named.parameter_id ^ _LOW_STREAM)
            local.append((total + 2**63) % 2**64 - 2**63)
        return local

    def digest(self, parameters: Sequence[ShardedParameter] | None = None) -> str:
        """Return one digest of weights: 32 hex digits. A collective; the same for any sharding.

        Args:
            parameters: the parameters to digest. None digests all.
        """
        text = ";".join(f"{name}:{value}" for name, value in sorted(self.digests(parameters).items()))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def gather_low_bits(self, parameter: ShardedParameter) -> Tensor | None:
        """Return the full low bits of a parameter on the CPU, or None if it has none. A collective."""
        if not self._keeps_low_bits(parameter):
            return None
        return parameter.gather_like(self.low_bits[parameter.name])
