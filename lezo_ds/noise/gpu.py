"""The noise operations for CUDA devices, with Triton."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.backend import NoiseBackend, Shard, Whole, pack_updates
from lezo_ds.noise.launch import Launch
from lezo_ds.zo.distributions import Distribution
from lezo_ds.zo.precision import UpdatePrecision
from lezo_ds.zo.updates import Update

_DISTRIBUTIONS: dict[Distribution, int] = {
    "normal": kernels.NORMAL.value,
    "rademacher": kernels.RADEMACHER.value,
}
_PRECISIONS: dict[UpdatePrecision, int] = {
    "nearest": kernels.NEAREST.value,
    "stochastic": kernels.STOCHASTIC.value,
    "fp32_master": kernels.MASTER.value,
}


class Tile(NamedTuple):
    """The share of one program on `NUM_WARPS` warps.

    Attributes:
        num_blocks: number of blocks, a power of two.
        per_block: number of elements of a block, which the distribution gives.
    """

    num_blocks: int
    per_block: int

    def number(self, start: int, num_elements: int) -> int:
        """Return how many tiles cover the elements [start, start + num_elements)."""
        covered = start % self.per_block + num_elements
        return -(-covered // (self.per_block * self.num_blocks)) if num_elements else 0


# No bit depends on the numbers of blocks and warps. They are not tuned: no element is read twice, so a tile
# only sets how many programs there are. triton.autotune would time the update on the weights themselves, with
# a copy of the shard in GPU memory (restore_value), during a step.
TILES: dict[Distribution, Tile] = {"normal": Tile(512, per_block=4), "rademacher": Tile(32, per_block=128)}
NUM_WARPS = 4

_Kind = TypeVar("_Kind", bound=Hashable)
_UNIT = 16
_ALIGNMENT = 512
"""Of each parameter's copies in bytes, like that of torch's allocator: matrix products may depend on it."""

_FEWEST_COLUMNS = 16
_NEVER = 1 << 62  # more than any number of programs
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class TritonNoise(NoiseBackend):
    """`NoiseBackend` on CUDA devices. Rows out of range are not caught.

    All parameters of a call are perturbed by one kernel, and all shards of a call are updated by one, if they
    are alike.
    """

    takes_blocks = True

    def _draw(
        self,
        distribution: Distribution,
        key: int,
        parameter_id: int,
        start: int,
        count: int,
        device: torch.device,
    ) -> Tensor:
        out = torch.empty(count, dtype=torch.float32, device=device)
        tile = TILES[distribution]
        aligned = start % tile.per_block == 0
        launch = _launch_of(
            kernels.draw_kernel, distribution, tile, tile.number(start, count), {"aligned": aligned}
        )
        launch.run(out, key, parameter_id, start, count)
        return out

    def _perturb_all(
        self, distribution: Distribution, wholes: Sequence[Whole], key: int, scale: float, num_signs: int
    ) -> list[list[Tensor]]:
        thetas, ids, out_dtypes = zip(*wholes, strict=True)
        made: list[list[Tensor]] = [list(thetas) for _ in range(num_signs)]
        groups = _perturb_groups(
            tuple([theta.data_ptr() for theta in thetas]),
            tuple([theta.shape for theta in thetas]),
            ids,
            tuple([theta.dtype for theta in thetas]),
            out_dtypes,
            num_signs,
            distribution,
            TILES[distribution],
            thetas[0].device,
        )
        for group in groups:
            # All results in one piece of memory: those of plus, then those of minus.
            out = torch.empty(group.num_bytes, dtype=torch.uint8, device=group.table.device)
            group.launch.run(thetas[group.first], out, group.table, key, scale)
            by_dtype = {dtype: out.view(dtype) for dtype in group.out_dtypes}
            for sign, place, out_dtype, view in group.copies:
                made[sign][place] = by_dtype[out_dtype].as_strided(*view)
        return made

    def _perturb_rows(
        self,
        distribution: Distribution,
        theta: Tensor,
        rows: Tensor,
        key: int,
        parameter_id: int,
        scale: float,
        outs: Sequence[Tensor],
    ) -> None:
        tile, width = TILES[distribution], theta.shape[1]
        aligned = width % tile.per_block == 0
        # A row that starts within a block can touch one more tile.
        tiles_per_row = tile.number(0 if aligned else tile.per_block - 1, width)
        launch = _launch_of(
            kernels.perturb_rows_kernel, distribution, tile, len(rows) * tiles_per_row, {"aligned": aligned}
        )
        plus, minus = outs if len(outs) == 2 else (outs[0], None)
        launch.run(theta, rows, plus, minus, key, parameter_id, scale, width, tiles_per_row)

    def _update_all(
        self,
        distribution: Distribution,
        shards: Sequence[Shard],
        steps: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        values, starts, ids, lows = zip(*shards, strict=True)
        groups = _update_groups(
            tuple([tensor.data_ptr() for tensor in values]),
            tuple([0 if low is None else low.data_ptr() for low in lows]),
            tuple([tensor.numel() for tensor in values]),
            starts,
            ids,
            tuple([tensor.dtype for tensor in values]),
            precision,
            distribution,
            TILES[distribution],
            values[0].device,
        )
        keys, multipliers = _updates_on_device(pack_updates(steps).tobytes(), values[0].device)
        for first, table, launch in groups:
            launch.run(values[first], lows[first], table, keys, multipliers, len(steps))


def _launch_of(
    kernel: Any,  # noqa: ANN401
    distribution: Distribution,
    tile: Tile,
    num_programs: int,
    constants: Mapping[str, Any],
) -> Launch:
    """Return a launch of a kernel of the noise, with the constants that all of them have."""
    common = {"distribution": _DISTRIBUTIONS[distribution], **tile._asdict()}
    return Launch(kernel, num_programs, {**constants, **common}, NUM_WARPS)


class _Perturbed(NamedTuple):
    """Parameters that one kernel perturbs.

    Attributes:
        first: place in the call of the first parameter.
        num_bytes: of all copies.
        out_dtypes: of the copies.
        copies: sign, place of the parameter in the call, dtype, and (shape, strides, offset) of each copy.
        table: for the kernel, on the device.
        launch: of the kernel.
    """

    first: int
    num_bytes: int
    out_dtypes: Sequence[torch.dtype]
    copies: Sequence[tuple[int, int, torch.dtype, tuple[Sequence[int], Sequence[int], int]]]
    table: Tensor
    launch: Launch


# Weights that stay where they are have the same tables at each step.
@functools.lru_cache(maxsize=1024)
def _perturb_groups(  # noqa: PLR0913 (they are the key of the cache)
    addresses: Sequence[int],
    shapes: Sequence[torch.Size],
    ids: Sequence[int],
    dtypes: Sequence[torch.dtype],
    out_dtypes: Sequence[torch.dtype],
    num_signs: int,
    distribution: Distribution,
    tile: Tile,
    device: torch.device,
) -> list[_Perturbed]:
    """Return what one kernel each perturbs; the first arguments tell of each parameter."""
    counts = [shape.numel() for shape in shapes]
    kinds = []
    for address, count, dtype, out_dtype in zip(addresses, counts, dtypes, out_dtypes, strict=True):
        other = dtype if out_dtype == torch.float32 else out_dtype
        kinds.append((dtype, other, _unit(address, count)))
    groups = []
    for (_, other, unit), places in _grouped(kinds):
        offsets, fields, end = [], [], 0
        for place in places:
            distance, is_fp32 = addresses[place] - addresses[places[0]], out_dtypes[place] == torch.float32
            fields.append((ids[place], counts[place] // unit, distance // unit, end // unit, is_fp32))
            offsets.append(end)
            end += -(-counts[place] * out_dtypes[place].itemsize // _ALIGNMENT) * _ALIGNMENT
        copies = []
        for sign in range(num_signs):
            for place, offset in zip(places, offsets, strict=True):
                dtype, shape = out_dtypes[place], shapes[place]
                strides = torch.empty(shape, device="meta").stride()
                copies.append((sign, place, dtype, (shape, strides, (sign * end + offset) // dtype.itemsize)))
        table, num_programs = _table([tile.number(0, counts[place]) for place in places], fields, device)
        constants = {
            "distance": end,
            "two_signs": num_signs == 2,
            "out_dtype": _DTYPES[other],
            "unit": unit,
            "num_columns": table.shape[1],
        }
        launch = _launch_of(kernels.perturb_kernel, distribution, tile, num_programs, constants)
        used = tuple({out_dtypes[place] for place in places})
        groups.append(_Perturbed(places[0], num_signs * end, used, copies, table, launch))
    return groups


class _Updated(NamedTuple):
    """Shards that one kernel updates.

    Attributes:
        first: place in the call of the first shard.
        table: for the kernel, on the device.
        launch: of the kernel.
    """

    first: int
    table: Tensor
    launch: Launch


@functools.lru_cache(maxsize=1024)
def _update_groups(  # noqa: PLR0913 (they are the key of the cache)
    addresses: Sequence[int],
    low_addresses: Sequence[int],
    counts: Sequence[int],
    starts: Sequence[int],
    ids: Sequence[int],
    dtypes: Sequence[torch.dtype],
    precision: UpdatePrecision,
    distribution: Distribution,
    tile: Tile,
    device: torch.device,
) -> list[_Updated]:
    """Return what one kernel each updates; the first arguments tell of each shard."""
    kinds = [
        (dtype, start % tile.per_block == 0, _unit(address, low, count))
        for address, low, count, start, dtype in zip(
            addresses, low_addresses, counts, starts, dtypes, strict=True
        )
    ]
    groups = []
    for (dtype, aligned, unit), places in _grouped(kinds):
        first = places[0]
        fields = [
            (
                ids[place],
                counts[place] // unit,
                (addresses[place] - addresses[first]) // unit,
                (low_addresses[place] - low_addresses[first]) // unit,
                starts[place],
            )
            for place in places
        ]
        tiles = [tile.number(starts[place], counts[place]) for place in places]
        table, num_programs = _table(tiles, fields, device)
        constants = {
            "precision": _PRECISIONS["nearest" if dtype == torch.float32 else precision],
            "aligned": aligned,
            "unit": unit,
            "num_columns": table.shape[1],
        }
        launch = _launch_of(kernels.update_kernel, distribution, tile, num_programs, constants)
        groups.append(_Updated(first, table, launch))
    return groups


def _unit(*values: int) -> int:
    """Return the unit in which a table gives sizes and distances that are multiples of those values."""
    return _UNIT if all(value % _UNIT == 0 for value in values) else 1


def _grouped(kinds: Sequence[_Kind]) -> Iterable[tuple[_Kind, list[int]]]:
    """Return each kind with its places."""
    found: dict[_Kind, list[int]] = {}
    for place, kind in enumerate(kinds):
        found.setdefault(kind, []).append(place)
    return found.items()


def _table(
    num_tiles: Sequence[int], fields: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, int]:
    """Return a table as `triton_kernels._part` reads it, on a device, and the number of programs.

    Args:
        num_tiles: of each part.
        fields: of each part.
        device: where the table is read.
    """
    first = np.cumsum([0, *num_tiles])
    # A kernel is compiled for each number of columns.
    num_columns = max(_FEWEST_COLUMNS, 1 << (len(fields) - 1).bit_length())
    table = np.full((1 + len(fields[0]), num_columns), _NEVER, dtype=np.int64)
    table[0, : len(fields)] = first[:-1]
    table[1:, : len(fields)] = np.array(fields, dtype=np.int64).T
    return _on_device(torch.from_numpy(table), device), int(first[-1])


# All blocks of a step have the same updates, so one copy to the GPU serves them all.
@functools.lru_cache(maxsize=4)
def _updates_on_device(updates: bytes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return packed updates on a device, read as uint64 and as fp32."""
    packed = _on_device(torch.frombuffer(bytearray(updates), dtype=torch.int64), device)
    return packed.view(torch.uint64), packed.view(torch.float32)


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    # Pinned memory and non_blocking let the host go on before the copy is done.
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
