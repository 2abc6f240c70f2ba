"""The noise operations for CUDA devices, with Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

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
TILES: dict[Distribution, Tile] = {"normal": Tile(256, per_block=4), "rademacher": Tile(32, per_block=128)}
NUM_WARPS = 4

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
        groups: dict[tuple[torch.dtype, torch.dtype, int], list[int]] = {}
        for place, (theta, _, out_dtype) in enumerate(wholes):
            other = theta.dtype if out_dtype == torch.float32 else out_dtype
            unit = _unit(theta.data_ptr(), theta.numel())
            groups.setdefault((theta.dtype, other, unit), []).append(place)
        made: list[list[Tensor]] = [[theta for theta, _, _ in wholes] for _ in range(num_signs)]
        for (_, other, unit), places in groups.items():
            group = [wholes[place] for place in places]
            parts = tuple(
                (parameter_id, theta.numel(), theta.data_ptr(), out_dtype == torch.float32)
                for theta, parameter_id, out_dtype in group
            )
            first = group[0].theta
            layout = _perturb_layout(parts, other.itemsize, TILES[distribution], unit, first.device)
            # All results in one piece of memory: those of plus, then those of minus.
            out = torch.empty(num_signs * layout.num_bytes, dtype=torch.uint8, device=first.device)
            _launch(
                kernels.perturb_kernel,
                distribution,
                layout.num_programs,
                theta_ptr=first,
                out_ptr=out,
                table_ptr=layout.table,
                key=key,
                scale=scale,
                distance=layout.num_bytes,
                two_signs=num_signs == 2,
                out_dtype=_DTYPES[other],
                unit=unit,
                num_columns=layout.table.shape[1],
            )
            as_dtype = {dtype: out.view(dtype) for dtype in {whole.out_dtype for whole in group}}
            for sign, copies in enumerate(made):
                for place, whole, offset in zip(places, group, layout.offsets, strict=True):
                    start = (sign * layout.num_bytes + offset) // whole.out_dtype.itemsize
                    shape, strides = whole.theta.shape, whole.theta.stride()
                    copies[place] = as_dtype[whole.out_dtype].as_strided(shape, strides, start)
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
        if not shards:
            return
        per_block = TILES[distribution].per_block
        groups: dict[tuple[torch.dtype, bool, int], list[Shard]] = {}
        for shard in shards:
            values, start, _, low = shard
            addresses = [tensor.data_ptr() for tensor in (values, low) if tensor is not None]
            kind = (values.dtype, start % per_block == 0, _unit(values.numel(), *addresses))
            groups.setdefault(kind, []).append(shard)
        device = shards[0].values.device
        updates = _updates_on_device(pack_updates(steps).tobytes(), device)
        for (dtype, aligned, unit), group in groups.items():
            parts = tuple(
                (parameter_id, len(values), values.data_ptr(), 0 if low is None else low.data_ptr(), start)
                for values, start, parameter_id, low in group
            )
            table, num_programs = _update_table(parts, TILES[distribution], unit, device)
            _launch(
                kernels.update_kernel,
                distribution,
                num_programs,
                shard_ptr=group[0].values,
                low_ptr=group[0].low,
                table_ptr=table,
                keys_ptr=updates.view(torch.uint64),
                multipliers_ptr=updates.view(torch.float32),
                num_steps=len(steps),
                precision=_PRECISIONS["nearest" if dtype == torch.float32 else precision],
                aligned=aligned,
                unit=unit,
                num_columns=table.shape[1],
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


class _Layout(NamedTuple):
    """How the copies of parameters lie in memory.

    Attributes:
        table: for the kernel, on the device.
        offsets: of the copies of each parameter in bytes.
        num_bytes: of all copies at one sign.
        num_programs: of the kernel.
    """

    table: Tensor
    offsets: tuple[int, ...]
    num_bytes: int
    num_programs: int


def _unit(*values: int) -> int:
    """Return the unit in which a table gives sizes and distances that are multiples of those values."""
    return _UNIT if all(value % _UNIT == 0 for value in values) else 1


# Weights that stay where they are have the same table at each step.
@functools.lru_cache(maxsize=1024)
def _perturb_layout(
    parts: tuple[tuple[int, int, int, bool], ...], itemsize: int, tile: Tile, unit: int, device: torch.device
) -> _Layout:
    """Return the layout of (parameter id, number of elements, address, whether copies are fp32)."""
    offsets, end = [], 0
    for _, count, _, is_fp32 in parts:
        offsets.append(end)
        size = count * (4 if is_fp32 else itemsize)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    base = parts[0][2]
    fields = [
        (parameter_id, count // unit, (address - base) // unit, offset // unit, is_fp32)
        for (parameter_id, count, address, is_fp32), offset in zip(parts, offsets, strict=True)
    ]
    table, num_programs = _table([tile.number(0, part[1]) for part in parts], fields, device)
    return _Layout(table, tuple(offsets), end, num_programs)


@functools.lru_cache(maxsize=1024)
def _update_table(
    parts: tuple[tuple[int, int, int, int, int], ...], tile: Tile, unit: int, device: torch.device
) -> tuple[Tensor, int]:
    """Return the table of (id, number of elements, two addresses, start), and the number of programs."""
    _, _, base, low_base, _ = parts[0]
    fields = [
        (parameter_id, count // unit, (address - base) // unit, (low_address - low_base) // unit, start)
        for parameter_id, count, address, low_address, start in parts
    ]
    return _table([tile.number(start, count) for _, count, *_, start in parts], fields, device)


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
