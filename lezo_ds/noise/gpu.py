"""The noise operations for CUDA devices, with Triton."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.backend import NoiseBackend, Shard, Whole, pack_updates
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
        _launch(
            kernels.draw_kernel,
            distribution,
            TILES[distribution].number(start, count),
            out_ptr=out,
            key=key,
            parameter_id=parameter_id,
            start=start,
            count=count,
            aligned=start % TILES[distribution].per_block == 0,
        )
        return out

    def _perturb_all(
        self, distribution: Distribution, wholes: Sequence[Whole], key: int, scale: float, num_signs: int
    ) -> list[list[Tensor]]:
        made: list[list[Tensor]] = [[theta for theta, _, _ in wholes] for _ in range(num_signs)]
        thetas, ids, out_dtypes = zip(*wholes, strict=True)
        addresses, counts = tuple(map(Tensor.data_ptr, thetas)), tuple(map(Tensor.numel, thetas))
        dtypes = tuple(theta.dtype for theta in thetas)
        device, tile = thetas[0].device, TILES[distribution]
        for group in _perturb_groups(addresses, counts, ids, dtypes, out_dtypes, tile, device):
            # All results in one piece of memory: those of plus, then those of minus.
            out = torch.empty(num_signs * group.num_bytes, dtype=torch.uint8, device=device)
            _launch(
                kernels.perturb_kernel,
                distribution,
                group.num_programs,
                theta_ptr=thetas[group.places[0]],
                out_ptr=out,
                table_ptr=group.table,
                key=key,
                scale=scale,
                distance=group.num_bytes,
                two_signs=num_signs == 2,
                out_dtype=_DTYPES[group.out_dtype],
                unit=group.unit,
                num_columns=group.table.shape[1],
            )
            by_dtype = {dtype: out.view(dtype) for dtype in (torch.float32, group.out_dtype)}
            for place, offset in zip(group.places, group.offsets, strict=True):
                copies, shape, strides = (
                    by_dtype[out_dtypes[place]],
                    thetas[place].shape,
                    thetas[place].stride(),
                )
                for sign in range(num_signs):
                    start = (sign * group.num_bytes + offset) // copies.itemsize
                    made[sign][place] = copies.as_strided(shape, strides, start)
        return made

    def _perturb(
        self,
        distribution: Distribution,
        theta: Tensor,
        rows: Tensor | None,
        key: int,
        parameter_id: int,
        scale: float,
        outs: Sequence[Tensor],
    ) -> None:
        assert rows is not None, "whole parameters are those of _perturb_all"
        tile, width = TILES[distribution], theta.shape[1]
        aligned = width % tile.per_block == 0
        # A row that starts within a block can touch one more tile.
        tiles_per_row = tile.number(0 if aligned else tile.per_block - 1, width)
        _launch(
            kernels.perturb_rows_kernel,
            distribution,
            len(rows) * tiles_per_row,
            theta_ptr=theta,
            rows_ptr=rows,
            plus_ptr=outs[0],
            minus_ptr=outs[1] if len(outs) > 1 else None,
            key=key,
            parameter_id=parameter_id,
            scale=scale,
            width=width,
            tiles_per_row=tiles_per_row,
            aligned=aligned,
        )

    def _update_all(
        self,
        distribution: Distribution,
        shards: Sequence[Shard],
        steps: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        values, starts, ids, lows = zip(*shards, strict=True)
        addresses, counts = tuple(map(Tensor.data_ptr, values)), tuple(map(Tensor.numel, values))
        low_addresses = tuple(0 if low is None else low.data_ptr() for low in lows)
        dtypes = tuple(tensor.dtype for tensor in values)
        device, tile = values[0].device, TILES[distribution]
        updates = _updates_on_device(pack_updates(steps).tobytes(), device)
        for group in _update_groups(addresses, low_addresses, counts, starts, ids, dtypes, tile, device):
            first = group.places[0]
            _launch(
                kernels.update_kernel,
                distribution,
                group.num_programs,
                shard_ptr=values[first],
                low_ptr=lows[first],
                table_ptr=group.table,
                keys_ptr=updates.view(torch.uint64),
                multipliers_ptr=updates.view(torch.float32),
                num_steps=len(steps),
                precision=_PRECISIONS["nearest" if dtypes[first] == torch.float32 else precision],
                aligned=group.aligned,
                unit=group.unit,
                num_columns=group.table.shape[1],
            )

    def _update(
        self,
        distribution: Distribution,
        shard: Tensor,
        start: int,
        parameter_id: int,
        steps: Sequence[Update],
        precision: UpdatePrecision,
        low: Tensor | None,
    ) -> None:
        self._update_all(distribution, [Shard(shard, start, parameter_id, low)], steps, precision)


class _Perturbed(NamedTuple):
    """Parameters that one kernel perturbs.

    Attributes:
        places: of the parameters in the call.
        out_dtype: of the copies that are not fp32.
        unit: of the table.
        offsets: of the copies of each parameter in bytes.
        num_bytes: of all copies at one sign.
        table: for the kernel, on the device.
        num_programs: of the kernel.
    """

    places: list[int]
    out_dtype: torch.dtype
    unit: int
    offsets: list[int]
    num_bytes: int
    table: Tensor
    num_programs: int


# Weights that stay where they are have the same tables at each step.
@functools.lru_cache(maxsize=1024)
def _perturb_groups(
    addresses: Sequence[int],
    counts: Sequence[int],
    ids: Sequence[int],
    dtypes: Sequence[torch.dtype],
    out_dtypes: Sequence[torch.dtype],
    tile: Tile,
    device: torch.device,
) -> list[_Perturbed]:
    """Return what one kernel each perturbs; the arguments tell of each parameter."""
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
        table, num_programs = _table([tile.number(0, counts[place]) for place in places], fields, device)
        groups.append(_Perturbed(places, other, unit, offsets, end, table, num_programs))
    return groups


class _Updated(NamedTuple):
    """Shards that one kernel updates.

    Attributes:
        places: of the shards in the call.
        aligned: whether all start where a block of the noise does.
        unit: of the table.
        table: for the kernel, on the device.
        num_programs: of the kernel.
    """

    places: list[int]
    aligned: bool
    unit: int
    table: Tensor
    num_programs: int


@functools.lru_cache(maxsize=1024)
def _update_groups(
    addresses: Sequence[int],
    low_addresses: Sequence[int],
    counts: Sequence[int],
    starts: Sequence[int],
    ids: Sequence[int],
    dtypes: Sequence[torch.dtype],
    tile: Tile,
    device: torch.device,
) -> list[_Updated]:
    """Return what one kernel each updates; the arguments tell of each shard."""
    kinds = [
        (dtype, start % tile.per_block == 0, _unit(address, low, count))
        for address, low, count, start, dtype in zip(
            addresses, low_addresses, counts, starts, dtypes, strict=True
        )
    ]
    groups = []
    for (_, aligned, unit), places in _grouped(kinds):
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
        groups.append(_Updated(places, aligned, unit, *_table(tiles, fields, device)))
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
def _updates_on_device(updates: bytes, device: torch.device) -> Tensor:
    """Return packed updates on a device: int64 [2 n]."""
    return _on_device(torch.frombuffer(bytearray(updates), dtype=torch.int64), device)


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    # Pinned memory and non_blocking let the host go on before the copy is done.
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _launch(kernel: Any, distribution: Distribution, num_programs: int, **arguments: Any) -> None:  # noqa: ANN401
    """Run a kernel on the device of its first argument."""
    if num_programs == 0:
        return
    first: Tensor = next(iter(arguments.values()))
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        # enable_fp_fusion=False: a fused multiply-add rounds once where the other backends round twice.
        kernel[(num_programs,)](
            **arguments,
            distribution=_DISTRIBUTIONS[distribution],
            **TILES[distribution]._asdict(),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
