"""Parameters: names and ids that are the same for any sharding, and the part of each that a rank has.

This room relies on these facts about DeepSpeed 0.19.8, which tests/model/test_sharding.py checks:
- A sharded parameter holds `ds_tensor`, a flat tensor of ceil(numel / size) elements: the slice of the
  flattened parameter that starts at rank * ceil(numel / size). Rank and size are those in the process group
  that shares the parameter. Elements past the parameter's end are uninitialized memory.
- `data` is empty while the parameter is not gathered.
- With NVMe offload, `ds_tensor` holds data only between a swap in and a swap out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from torch import Tensor, nn

from lezo_ds.distributed import device
from lezo_ds.noise import ALL, Region


@dataclass(frozen=True)
class NamedParameter:
    """A parameter's name in the unsharded model, its 32-bit id, and its block (`BlockLayout.block_of`)."""

    name: str
    parameter_id: int
    block: int
    region: Region = ALL
    """What a module computes with: the full parameter, or a rectangle of it (sharding/tensor_parallel.py)."""


def parameter_ids(names: Iterable[str]) -> dict[str, int]:
    """Return a distinct 32-bit id for each parameter name, which selects its stream of noise.

    An id is a hash of the name. Of two names with the same hash, the later one is hashed again.
    """
    names_by_id: dict[int, str] = {}
    for name in sorted(names):
        attempt, candidate = 0, _hash32(name)
        while candidate in names_by_id:
            attempt += 1
            candidate = _hash32(f"{name}#{attempt}")
        names_by_id[candidate] = name
    return {name: parameter_id for parameter_id, name in names_by_id.items()}


def _hash32(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def table_hash(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return a hash of all names and shapes, 32 hex digits. Models with the same hash get the same noise."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(shapes):
        digest.update(f"{name}{list(shapes[name])};".encode())
    return digest.hexdigest()


class ShardedParameter:
    """One parameter of the model, of which this rank has the `count` elements that `region` describes.

    ZeRO-3 gives each rank one piece of the flattened parameter. `count` is 0 if it has only padding.
    """

    is_replicated = False  # whether all ranks of the group have all of it
    is_local = False  # whether modules compute with this rank's part, so that nothing is gathered

    def __init__(self, parameter: Any, named: NamedParameter) -> None:
        self.parameter = (
            parameter  # nn.Parameter with DeepSpeed's attributes; empty unless it is gathered
        )
        self.named = named
        self.name = named.name
        self.shape = tuple(parameter.ds_shape)
        self.numel = int(parameter.ds_numel)
        self.decays = len(self.shape) > 1  # biases and norms do not, as in MeZO's code
        self.group = parameter.ds_process_group
        rank, num_ranks = parameter.ds_zero_partition_rank, parameter.ds_zero_partition_world_size
        start, self.count = shard_range(self.numel, rank, num_ranks)
        self.region = Region(start)

    def shard(self, *, write: bool = False) -> OpenShard:
        """Open this rank's elements [count] without the padding. Changes are kept only with `write`."""
        return OpenShard(self.parameter, self.count, write=write)

    @property
    def compute_shape(self) -> tuple[int, ...]:
        """Shape of what modules compute with."""
        return self.shape

    def own_part(self, values: Tensor) -> Tensor:
        """Return this rank's part [count] of values of the shape that modules compute with."""
        return values.reshape(-1)[self.region.start : self.region.start + self.count]

    def gather(self) -> Tensor:
        """Return the full parameter on the CPU, on every rank. A collective."""
        with self.shard() as shard:
            return self.gather_like(shard)

    def gather_like(self, mine: Tensor) -> Tensor:
        """Return, on the CPU, the full tensor of which `mine` [count] is this rank's part. A collective."""
        num_ranks = self.parameter.ds_zero_partition_world_size
        padded = torch.zeros(-(-self.numel // num_ranks), dtype=mine.dtype, device=device())
        padded[: self.count] = mine
        full = torch.empty(padded.numel() * num_ranks, dtype=padded.dtype, device=padded.device)
        # The message is sent as bytes, because gloo does not support every dtype (for example, int16).
        comm.all_gather_into_tensor(
            full.view(torch.uint8), padded.view(torch.uint8), group=self.group
        )
        return full[: self.numel].view(self.shape).cpu()


class OpenShard:
    """The context of `ShardedParameter.shard`. A generator would take twice the time."""

    def __init__(self, parameter: Any, count: int, *, write: bool = False) -> None:
        self._parameter = parameter
        self._count = count
        self._write = write
        self.is_swapped = is_in_file(parameter)

    def __enter__(self) -> Tensor:
        if self.is_swapped:  # the swapper has no public methods for one parameter
            self._parameter.nvme_swapper.swap_in([self._parameter], async_op=False)
        # A weight that tensor parallelism splits is an ordinary parameter.
        flat: Tensor = getattr(self._parameter, "ds_tensor", self._parameter).data.view(-1)
        return flat[: self._count]

    def __exit__(self, *_: object) -> None:
        if self.is_swapped and self._write:
            self._parameter.nvme_swapper.swap_out_and_release([self._parameter])
        elif self.is_swapped:
            self._parameter.nvme_swapper.remove_partition_and_release_buffers([self._parameter])


def put_parameters(model: nn.Module, new: Mapping[nn.Parameter, Any]) -> None:
    """Replace all parameters of a model, tied ones too, and move its buffers to this rank's device."""
    for module in model.modules():
        module._parameters.update(
            {n: new[p] for n, p in module._parameters.items() if p is not None}
        )
        module._buffers.update(
            {n: b.to(device()) for n, b in module._buffers.items() if b is not None}
        )


def is_in_file(parameter: Any) -> bool:
    stored = getattr(parameter, "ds_tensor", None)
    return stored is not None and stored.status is PartitionedParamStatus.NOT_AVAILABLE


def is_on_device(parameter: Any) -> bool:
    return not is_in_file(parameter) and bool(parameter.ds_tensor.device == device())


def shard_range(numel: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return (start, count) of the elements of a parameter that one of `num_ranks` ranks holds."""
    size = -(-numel // num_ranks)
    start = min(rank * size, numel)
    return start, min(start + size, numel) - start
