"""Shards: what one rank stores of each parameter.

The elements of a parameter are counted in row-major order. A rank stores those of one `Region`, and
the ranks of a group store the parameter together. An example is a parameter [3, 4]:

    FlatShard (ZeRO-3), 3 ranks          RectangleShard (tensor parallelism), 2 ranks

    rank 0   0   1   2   3               0   1 |  2   3
    rank 1   4   5   6   7               4   5 |  6   7
    rank 2   8   9  10  11               8   9 | 10  11
                                        rank 0 | rank 1

Everything that loads, updates, compares or writes weights (`weights`, the checkpoints) uses the
interface of `Shard` and does not ask for its class. To store weights in another form, write another
subclass, and make it where `load_sharded_model` makes the shards.

The facts about DeepSpeed that these classes rely on are in docs/deepspeed.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm
from deepspeed.checkpoint.affine import AffinePiece
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.noise import Elements, Region, UpdateTarget


@dataclass(eq=False)
class Shard(ABC):
    """What one rank stores of one parameter.

    Attributes:
        parameter: the parameter in the module tree. Between passes its `data` is empty if it is
            gathered.
        name: its name in the unsharded model, an adapter's wrappers left out.
        block: index of its transformer block, or of its group of layers outside the blocks
            (`BlockLayout.block_of`).
        elements: those that this rank stores.
        group: the ranks that store the full parameter together.
        computed: the elements that modules compute with on this rank. These are all of them, except
            of a weight that tensor parallelism splits.
        is_replicated: whether each rank of the group stores the full parameter.
        count: number of the stored elements. It is 0 if the parameter is too small for all ranks to
            have some.
        shape: of the full parameter.
        numel: number of elements of the full parameter.
        decays: whether weight decay applies: to matrices, but not to biases and norms, as in MeZO's
            code.
        is_trained: whether updates change the parameter.
        dtype: of what modules compute with.
        device: where the stored elements are; the CPU if they are offloaded.
    """

    parameter: Any
    name: str
    block: int
    elements: Elements
    group: Any

    is_replicated = False

    def __post_init__(self) -> None:
        self.shape = self.elements.shape
        self.computed = Elements.all_of(self.elements.parameter_id, self.shape)
        self.count = self.elements.region.size
        self.numel = math.prod(self.shape)
        self.decays = len(self.shape) > 1
        self.is_trained: bool = self.parameter.requires_grad
        self.dtype: torch.dtype = self.parameter.dtype
        self.device: torch.device = self.parameter.device

    def memory(self) -> Tensor:
        """Return all that this rank stores, in its format: [n], a view."""
        raise NotImplementedError

    def stored(self) -> Tensor:
        """Return the stored elements [count] in the order of their region, without any padding.

        Of a parameter that is trained, and has no codes, this is a view: what is written to it is
        stored.
        """
        return self.memory()[: self.count]

    def fill(self, values: Tensor) -> None:
        """Store values [count] of any dtype, converted to what this class stores."""
        self.stored().copy_(values)

    def trained_codes(self) -> Tensor | None:
        """Return the codes that updates move, uint8 [count], a view; None if there are none."""
        return None

    def target(self, low: Tensor | None = None) -> UpdateTarget:
        """Return what an update changes in place: the stored elements, and their low bits."""
        return UpdateTarget(self.stored(), self.elements, low)

    def gather(self) -> Tensor:
        """Return the full parameter [*shape] on this rank's device. A collective of `group`."""
        return self.gather_like(self.stored())

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

    def __init__(
        self,
        parameter: Any,
        name: str,
        block: int,
        parameter_id: int,
    ) -> None:
        self._size, shape = self._layout(parameter)
        numel = math.prod(shape)
        start = min(parameter.ds_zero_partition_rank * self._size, numel)
        count = min(self._size, numel - start)
        elements = Elements(parameter_id, shape, Region.run(start, count))
        group = parameter.ds_process_group
        super().__init__(parameter, name, block, elements, group)
        self.device = parameter.ds_tensor.device

    @staticmethod
    def _layout(parameter: Any) -> tuple[int, tuple[int, ...]]:
        """Return the number of elements of a rank's slice, and the shape of the full parameter."""
        num_ranks = parameter.ds_zero_partition_world_size
        size = -(-parameter.ds_numel // num_ranks)
        return size, tuple(parameter.ds_shape)

    def memory(self) -> Tensor:
        own_slice: Tensor = self.parameter.ds_tensor.data
        return own_slice

    def gather_like(self, stored: Tensor) -> Tensor:
        by_rank = _gather_padded(stored, self._size, self.group)
        values = by_rank.view(-1)[: self.numel]
        return values.view(self.shape)


@dataclass(frozen=True)
class Split:
    """How tensor parallelism splits a parameter.

    Attributes:
        shape: of the full parameter.
        pieces: by rank of the group, a rectangle of the full parameter, in DeepSpeed's terms.
            Without any, each rank has the full parameter.
        group: the ranks that split the weights.
    """

    shape: tuple[int, ...]
    pieces: Sequence[AffinePiece]
    group: Any


class RectangleShard(Shard):
    """Tensor parallelism: a rectangle of the parameter, or all of it.

    Modules compute with what is here, and nothing is gathered.
    """

    def __init__(
        self,
        parameter: Any,
        name: str,
        block: int,
        parameter_id: int,
        split: Split,
    ) -> None:
        self._pieces = split.pieces
        self.is_replicated = not split.pieces
        elements = Elements.all_of(parameter_id, split.shape)
        if split.pieces:
            own_piece = split.pieces[comm.get_rank(split.group)]
            elements = elements._replace(region=_region_of(own_piece))
        super().__init__(parameter, name, block, elements, split.group)
        self.computed = elements

    def memory(self) -> Tensor:
        rectangle: Tensor = self.parameter.data
        return rectangle.view(-1)

    def gather_like(self, stored: Tensor) -> Tensor:
        if self.is_replicated:
            return stored.view(self.shape)
        size = max(piece.numel for piece in self._pieces)
        by_rank = _gather_padded(stored, size, self.group)
        full = torch.empty(self.numel, dtype=stored.dtype, device=by_rank.device)
        for padded, piece in zip(by_rank, self._pieces, strict=True):
            values = padded[: piece.numel]
            place = piece.source_view(full)
            place.copy_(values.view(piece.shape))
        return full.view(self.shape)


def _region_of(piece: AffinePiece) -> Region:
    """Return the elements of a piece, which is a view of a parameter: an offset and strides."""
    start = piece.source_offset
    stride = piece.source_strides[0]
    has_full_rows = len(piece.shape) == 1 or math.prod(piece.shape[1:]) == stride
    if has_full_rows:
        return Region.run(start, piece.numel)
    width = piece.shape[-1]
    num_rows = piece.numel // width
    return Region(start, num_rows, width, stride)


def _gather_padded(stored: Tensor, size: int, group: Any) -> Tensor:
    """Return what each rank of a group stores, padded to `size` elements: [ranks, size]."""
    padded = torch.zeros(size, dtype=stored.dtype, device=distributed.device())
    padded[: stored.numel()] = stored
    num_ranks = distributed.world_size(group)
    by_rank = padded.new_empty(num_ranks, size)
    # The message is sent as bytes, because gloo does not support every dtype (for example, int16).
    message = by_rank.view(-1).view(torch.uint8)
    comm.all_gather_into_tensor(message, padded.view(torch.uint8), group=group)
    return by_rank
