"""Shards: what one rank stores of each parameter.

The elements of a parameter are counted in row-major order. A rank stores those of one `Region`, and
the ranks of a group store the parameter together. An example is a parameter [3, 4]:

    FlatShard (ZeRO-3), 3 ranks          RectangleShard (tensor parallelism), 2 ranks

    rank 0   0   1   2   3               0   1 |  2   3
    rank 1   4   5   6   7               4   5 |  6   7
    rank 2   8   9  10  11               8   9 | 10  11
                                        rank 0 | rank 1

Everything that loads, updates, compares or writes weights (`weights`, `integrity`, the checkpoints)
uses the interface of `Shard` and does not ask for its class. To store weights in another form,
write another subclass, and make it where `load_sharded_model` makes the shards.

The facts about DeepSpeed that these classes rely on are in docs/deepspeed.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.noise import ALL, Region
from lezo_ds.sharding.parameters import NamedParameter


@dataclass(eq=False)
class Shard(ABC):
    """What one rank stores of one parameter.

    Attributes:
        parameter: the parameter in the module tree. Between passes its `data` is empty if it is
            gathered.
        named: its identity, and the elements that modules compute with.
        shape: of the full parameter.
        region: the elements of the full parameter that this rank stores.
        count: number of these elements. It is 0 if the parameter is too small for all ranks to have
            some.
        group: the ranks that store the full parameter together.
        compute_shape: of what modules compute with on this rank.
        is_gathered: whether that is the full parameter, which is gathered before a module runs.
            Otherwise modules compute with what is stored here.
        is_replicated: whether each rank of the group stores the full parameter.
        name: `named.name`.
        numel: number of elements of the full parameter.
        decays: whether weight decay applies: to matrices, but not to biases and norms, as in MeZO's
            code.
    """

    parameter: Any
    named: NamedParameter
    shape: tuple[int, ...]
    region: Region
    count: int
    group: Any
    compute_shape: tuple[int, ...]
    is_gathered: bool
    is_replicated: bool
    name: str = field(init=False)
    numel: int = field(init=False)
    decays: bool = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.named.name
        self.numel = math.prod(self.shape)
        self.decays = len(self.shape) > 1

    @property
    def is_trained(self) -> bool:
        """Whether updates change the parameter."""
        return bool(self.parameter.requires_grad)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of what modules compute with."""
        return self.parameter.dtype  # type: ignore[no-any-return]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the stored elements are; the CPU if they are in a file."""

    @property
    @abstractmethod
    def is_in_memory(self) -> bool:
        """Whether the elements are in memory while the shard is not open.

        If so, the tensor that `open` gives stays valid after the context, and later writes to it
        count.
        """

    @abstractmethod
    def open(self, *, write: bool = False) -> AbstractContextManager[Tensor]:
        """Open the stored elements: a tensor [count] in the order of `region`, without any padding.

        Changes to the tensor are stored only with `write`. Only a parameter that is trained must
        support it.
        """

    def fill(self, values: Tensor) -> None:
        """Store values [count] of any dtype, converted to what this class stores."""
        with self.open(write=True) as stored:
            stored.copy_(values)

    @abstractmethod
    def own_elements(self, values: Tensor) -> Tensor:
        """Return the stored ones [count] of elements [*compute_shape]."""

    def gather(self) -> Tensor:
        """Return the full parameter [*shape] on this rank's device. A collective of `group`."""
        with self.open() as stored:
            return self.gather_like(stored)

    @abstractmethod
    def gather_like(self, stored: Tensor) -> Tensor:
        """Return a full tensor [*shape] of which each rank has the elements [count] that it stores.

        `stored` has any dtype, such as int16 for low bits. The result is on this rank's device. A
        collective of `group`.
        """


class FlatShard(Shard):
    """ZeRO-3: a slice of the flattened parameter, in the tensor that DeepSpeed made for it.

    Rank r of n stores ceil(numel / n) elements from r * ceil(numel / n) on. Past the parameter's
    end, DeepSpeed pads the slice with uninitialized memory, which is never read.
    """

    def __init__(self, parameter: Any, named: NamedParameter) -> None:
        rank = parameter.ds_zero_partition_rank
        self._num_ranks = parameter.ds_zero_partition_world_size
        start, count = shard_range(parameter.ds_numel, rank, self._num_ranks)
        shape = tuple(parameter.ds_shape)
        super().__init__(
            parameter,
            named,
            shape=shape,
            region=Region(start),
            count=count,
            group=parameter.ds_process_group,
            compute_shape=shape,
            is_gathered=True,
            is_replicated=False,
        )

    @property
    def device(self) -> torch.device:
        return self.parameter.ds_tensor.device  # type: ignore[no-any-return]

    @property
    def is_in_memory(self) -> bool:
        return not is_in_file(self.parameter)

    def open(self, *, write: bool = False) -> AbstractContextManager[Tensor]:
        return OpenSlice(self.parameter, self.count, write=write)

    def own_elements(self, values: Tensor) -> Tensor:
        start = self.region.start
        return values.reshape(-1)[start : start + self.count]

    def gather_like(self, stored: Tensor) -> Tensor:
        size = -(-self.numel // self._num_ranks)
        by_rank = _gather_padded(stored, size, self._num_ranks, self.group)
        return by_rank.view(-1)[: self.numel].view(self.shape)


class OpenSlice:
    """The context of `FlatShard.open`. A generator would take twice the time."""

    def __init__(self, parameter: Any, count: int, *, write: bool = False) -> None:
        self._parameter = parameter
        self._count = count
        self._write = write
        self._is_swapped = is_in_file(parameter)

    def __enter__(self) -> Tensor:
        if self._is_swapped:  # the swapper has no public methods for one parameter
            self._parameter.nvme_swapper.swap_in([self._parameter], async_op=False)
        flat: Tensor = self._parameter.ds_tensor.data
        return flat[: self._count]

    def __exit__(self, *_: object) -> None:
        if not self._is_swapped:
            return
        if self._write:
            self._parameter.nvme_swapper.swap_out_and_release([self._parameter])
        else:
            self._parameter.nvme_swapper.remove_partition_and_release_buffers([self._parameter])


@dataclass(frozen=True)
class Rectangle:
    """The elements of a parameter that one rank stores."""

    region: Region
    count: int


@dataclass(frozen=True)
class Split:
    """How tensor parallelism splits a parameter.

    Attributes:
        shape: of the full parameter.
        rectangles: by rank of the group. Without any, each rank has the full parameter.
        group: the ranks that split the weights.
    """

    shape: tuple[int, ...]
    rectangles: Sequence[Rectangle]
    group: Any


class RectangleShard(Shard):
    """Tensor parallelism: a rectangle of the parameter, or all of it.

    Modules compute with what is here, and nothing is gathered.
    """

    def __init__(self, parameter: Any, named: NamedParameter, split: Split) -> None:
        region = ALL
        if split.rectangles:
            region = split.rectangles[comm.get_rank(split.group)].region
        self._rectangles = split.rectangles
        super().__init__(
            parameter,
            replace(named, region=region),
            shape=split.shape,
            region=region,
            count=parameter.numel(),
            group=split.group,
            compute_shape=tuple(parameter.shape),
            is_gathered=False,
            is_replicated=not split.rectangles,
        )

    @property
    def device(self) -> torch.device:
        return self.parameter.device  # type: ignore[no-any-return]

    @property
    def is_in_memory(self) -> bool:
        return True

    def open(self, *, write: bool = False) -> AbstractContextManager[Tensor]:
        return nullcontext(self.parameter.data.view(-1))

    def own_elements(self, values: Tensor) -> Tensor:
        return values.reshape(-1)

    def gather_like(self, stored: Tensor) -> Tensor:
        if self.is_replicated:
            return stored.view(self.shape)
        size = max(rectangle.count for rectangle in self._rectangles)
        by_rank = _gather_padded(stored, size, len(self._rectangles), self.group)
        full = torch.empty(self.numel, dtype=stored.dtype, device=by_rank.device)
        for values, rectangle in zip(by_rank, self._rectangles, strict=True):
            num_rows, width, stride = rectangle.region.rows(rectangle.count)
            rows = full.as_strided((num_rows, width), (stride, 1), rectangle.region.start)
            rows.copy_(values[: rectangle.count].view(rows.shape))
        return full.view(self.shape)


def _gather_padded(stored: Tensor, size: int, num_ranks: int, group: Any) -> Tensor:
    """Return what each rank of a group stores, padded to `size` elements: [num_ranks, size]."""
    padded = torch.zeros(size, dtype=stored.dtype, device=distributed.device())
    padded[: stored.numel()] = stored
    by_rank = torch.empty(num_ranks, size, dtype=stored.dtype, device=distributed.device())
    # The message is sent as bytes, because gloo does not support every dtype (for example, int16).
    comm.all_gather_into_tensor(
        by_rank.view(-1).view(torch.uint8), padded.view(torch.uint8), group=group
    )
    return by_rank


def is_in_file(parameter: Any) -> bool:
    """Return whether a sharded parameter's slice is in a file (DeepSpeed's offload to NVMe)."""
    return parameter.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE


def is_on_device(parameter: Any) -> bool:
    """Return whether a sharded parameter's slice is in the memory of this rank's device."""
    return not is_in_file(parameter) and bool(parameter.ds_tensor.device == distributed.device())


def shard_range(numel: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return (start, count) of the elements of a parameter that one of `num_ranks` ranks stores."""
    size = -(-numel // num_ranks)
    start = min(rank * size, numel)
    stop = min(start + size, numel)
    return start, stop - start
