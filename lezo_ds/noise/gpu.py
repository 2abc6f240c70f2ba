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
from lezo_ds.noise.backend import NoiseBackend, Shard, Weight, pack_updates
from lezo_ds.noise.draws import PER_BLOCK
from lezo_ds.noise.launch import Launch
from lezo_ds.zo.updates import Distribution, Update, UpdatePrecision

# Blocks of one program. No bit depends on it, and it is not tuned: no element is read twice, so it only sets
# how many programs there are. triton.autotune would time the update on the weights themselves.
NUM_BLOCKS: dict[Distribution, int] = {"normal": 512, "rademacher": 32}

_UNIT = 16
_ALIGNMENT = 512  # of copies in bytes, like that of torch's allocator: matrix products may depend on it
_FEWEST_COLUMNS = 16
_NEVER = 1 << 62  # more than any number of programs
_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class TritonNoise(NoiseBackend):
    """`NoiseBackend` on CUDA devices. Rows out of range are not caught.

    One kernel perturbs all parameters of a call, and one updates all shards of a call, if they are alike.
    """

    takes_blocks = True

    def draw(
        self,
        key: int,
        parameter_id: int,
        start: int,
        count: int,
        device: torch.device,
        distribution: Distribution = "normal",
    ) -> Tensor:
        out = torch.empty(count, dtype=torch.float32, device=device)
        aligned = start % PER_BLOCK[distribution] == 0
        launch = _launch(
            kernels.draw_kernel, distribution, _num_tiles(distribution, start, count), aligned=aligned
        )
        launch.run(out, key, parameter_id, start, count)
        return out

    def _perturb(
        self, weights: Sequence[Weight], key: int, scale: float, num_signs: int, distribution: Distribution
    ) -> list[list[Tensor]]:
        if weights[0].rows is not None:
            return [_perturb_rows(weight, key, scale, num_signs, distribution) for weight in weights]
        facts = [
            (w.theta.data_ptr(), w.theta.shape, w.parameter_id, w.theta.dtype, w.out_dtype) for w in weights
        ]
        device = weights[0].theta.device
        copies: list[list[Tensor]] = [[] for _ in weights]
        for group in _perturb_groups(tuple(facts), num_signs, distribution, device):
            # All copies in one piece of memory: those of plus, then those of minus.
            out = torch.empty(group.num_bytes, dtype=torch.uint8, device=device)
            group.launch.run(weights[group.first].theta, out, group.table, key, scale)
            by_dtype = {dtype: out.view(dtype) for dtype in group.out_dtypes}
            for place, dtype, view in group.copies:
                copies[place].append(by_dtype[dtype].as_strided(*view))
        return copies

    def update_(
        self,
        shards: Sequence[Shard],
        updates: Sequence[Update],
        precision: UpdatePrecision,
        distribution: Distribution = "normal",
    ) -> None:
        if not (shards and updates):
            return
        facts = [
            (v.data_ptr(), 0 if low is None else low.data_ptr(), v.numel(), start, parameter_id, v.dtype)
            for v, start, parameter_id, low in shards
        ]
        device = shards[0].values.device
        keys, multipliers = _updates_on_device(pack_updates(updates).tobytes(), device)
        for first, table, launch in _update_groups(tuple(facts), precision, distribution, device):
            launch.run(shards[first].values, shards[first].low, table, keys, multipliers, len(updates))


def _perturb_rows(
    weight: Weight, key: int, scale: float, num_signs: int, distribution: Distribution
) -> list[Tensor]:
    theta, parameter_id, out_dtype, rows = weight
    assert rows is not None
    width, per_block = theta.shape[1], PER_BLOCK[distribution]
    outs = [torch.empty((len(rows), width), dtype=out_dtype, device=theta.device) for _ in range(num_signs)]
    aligned = width % per_block == 0
    # A row that starts within a block can touch one more tile.
    tiles_of_row = _num_tiles(distribution, 0 if aligned else per_block - 1, width)
    launch = _launch(kernels.perturb_rows_kernel, distribution, len(rows) * tiles_of_row, aligned=aligned)
    plus, minus = outs if num_signs == 2 else (outs[0], None)
    launch.run(theta, rows, plus, minus, key, parameter_id, scale, width, tiles_of_row)
    return outs


def _launch(
    kernel: Any,  # noqa: ANN401
    distribution: Distribution,
    num_programs: int,
    **constants: object,
) -> Launch:
    common = {"distribution": distribution, "num_blocks": NUM_BLOCKS[distribution]}
    return Launch(kernel, num_programs, {**constants, **common})


def _num_tiles(distribution: Distribution, start: int, count: int) -> int:
    """Return how many programs cover the elements [start, start + count)."""
    per_block = PER_BLOCK[distribution]
    return -(-(start % per_block + count) // (per_block * NUM_BLOCKS[distribution])) if count else 0


class _Perturbed(NamedTuple):
    """Parameters that one kernel perturbs."""

    first: int  # place of the first parameter in the call
    num_bytes: int  # of all copies
    out_dtypes: set[torch.dtype]
    copies: Sequence[tuple[int, torch.dtype, tuple[Sequence[int], Sequence[int], int]]]  # place, dtype, view
    table: Tensor
    launch: Launch


# Weights that stay where they are have the same tables at each step.
@functools.lru_cache(maxsize=1024)
def _perturb_groups(
    facts: Sequence[tuple[int, torch.Size, int, torch.dtype, torch.dtype]],
    num_signs: int,
    distribution: Distribution,
    device: torch.device,
) -> list[_Perturbed]:
    """Return what one kernel each perturbs, of weights: address, shape, id, dtype and dtype of the copies."""
    alike: dict[Any, list[int]] = {}
    for place, (address, shape, _, dtype, out_dtype) in enumerate(facts):
        other = dtype if out_dtype == torch.float32 else out_dtype
        alike.setdefault((dtype, other, _unit(address, shape.numel())), []).append(place)
    groups = []
    for (_, other, unit), places in alike.items():
        first, end = facts[places[0]][0], 0
        rows, offsets = [], []
        for place in places:
            address, shape, parameter_id, _, out_dtype = facts[place]
            count, is_fp32 = shape.numel(), out_dtype == torch.float32
            tiles = _num_tiles(distribution, 0, count)
            rows.append((tiles, parameter_id, count // unit, (address - first) // unit, end // unit, is_fp32))
            offsets.append(end)
            end += -(-count * out_dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        copies = []
        for sign in range(num_signs):
            for place, offset in zip(places, offsets, strict=True):
                shape, out_dtype = facts[place][1], facts[place][4]
                strides = torch.empty(shape, device="meta").stride()
                view = (shape, strides, (sign * end + offset) // out_dtype.itemsize)
                copies.append((place, out_dtype, view))
        table, num_programs = _table(rows, device)
        launch = _launch(
            kernels.perturb_kernel,
            distribution,
            num_programs,
            distance=end,
            two_signs=num_signs == 2,
            out_dtype=_TRITON_TYPES[other],
            unit=unit,
            num_columns=table.shape[1],
        )
        out_dtypes = {facts[place][4] for place in places}
        groups.append(_Perturbed(places[0], num_signs * end, out_dtypes, copies, table, launch))
    return groups


@functools.lru_cache(maxsize=1024)
def _update_groups(
    facts: Sequence[tuple[int, int, int, int, int, torch.dtype]],
    precision: UpdatePrecision,
    distribution: Distribution,
    device: torch.device,
) -> list[tuple[int, Tensor, Launch]]:
    """Return (place of the first, table, launch) of shards that one kernel each updates.

    The facts of a shard are address, address of the low bits, number of elements, start, id and dtype.
    """
    alike: dict[Any, list[int]] = {}
    for place, (address, low, count, start, _, dtype) in enumerate(facts):
        aligned = start % PER_BLOCK[distribution] == 0
        alike.setdefault((dtype, aligned, _unit(address, low, count)), []).append(place)
    groups = []
    for (dtype, aligned, unit), places in alike.items():
        first, first_low = facts[places[0]][:2]
        rows = []
        for place in places:
            address, low, count, start, parameter_id, _ = facts[place]
            tiles = _num_tiles(distribution, start, count)
            distances = ((address - first) // unit, (low - first_low) // unit)
            rows.append((tiles, parameter_id, count // unit, *distances, start))
        table, num_programs = _table(rows, device)
        launch = _launch(
            kernels.update_kernel,
            distribution,
            num_programs,
            precision="nearest" if dtype == torch.float32 else precision,
            aligned=aligned,
            unit=unit,
            num_columns=table.shape[1],
        )
        groups.append((places[0], table, launch))
    return groups


def _unit(*values: int) -> int:
    """Return the unit in which a table gives sizes and distances that are multiples of those values."""
    return _UNIT if all(value % _UNIT == 0 for value in values) else 1


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, int]:
    """Return a table as `triton_kernels._part` reads it, and the number of programs.

    The rows are the number of programs and the fields of each part.
    """
    num_tiles, *fields = np.array(rows, dtype=np.int64).T
    # A kernel is compiled for each number of columns.
    num_columns = max(_FEWEST_COLUMNS, 1 << (len(rows) - 1).bit_length())
    table = np.full((1 + len(fields), num_columns), _NEVER, dtype=np.int64)
    table[:, : len(rows)] = [np.cumsum(num_tiles) - num_tiles, *fields]
    return _on_device(torch.from_numpy(table), device), int(num_tiles.sum())


# All blocks of a step have the same updates, so one copy to the GPU serves them all.
@functools.lru_cache(maxsize=4)
def _updates_on_device(updates: bytes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return packed updates on a device, read as uint64 and as fp32."""
    packed = _on_device(torch.frombuffer(bytearray(updates), dtype=torch.int64), device)
    return packed.view(torch.uint64), packed.view(torch.float32)


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    # Pinned memory and non_blocking let the host go on before the copy is done.
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
