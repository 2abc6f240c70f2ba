"""The noise operations for CUDA devices, with Triton.

A call names tensors that mostly stay where they are from step to step. So what follows from their
addresses is made once and cached: the table of each launch, on the GPU (see `triton_kernels`), and
the compiled kernel. A later call looks them up and launches; that is all its time on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from lezo_ds.noise import (
    Copies,
    Kernels,
    Region,
    UpdateTarget,
    Weight,
    aligned,
    bytes_of_copies,
    checked_terms,
    pack_updates,
)
from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.philox import PER_BLOCK
from lezo_ds.zo.laws import Distribution
from lezo_ds.zo.updates import Update, UpdatePrecision

# Blocks of a tile, which one program handles.
BLOCKS_OF_TILE: dict[Distribution, int] = {"normal": 512, "rademacher": 32}
_BLOCKS_OF_SUBTRACTION = 512  # of 4 elements
# In FIRST_PROGRAM of the unused columns of a table.
_NO_PROGRAM = 1 << 62
Constants = tuple[tuple[str, Any], ...]
"""The constexpr arguments of a kernel: names and values."""
TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}


class CompiledKernel:
    """A kernel with its constants, which Triton chooses and compiles in the first run only.

    Triton's own call looks at types, and at which addresses and integers are multiples of 16 unless
    `do_not_specialize` excepts them. That takes longer than the launch, and its result stays: runs
    of one compiled kernel must not differ in these.

    Attributes:
        constants: the kernel's last arguments, all constexpr, by name.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        self.constants = constants
        self._kernel = kernel
        names = kernel.arg_names[-len(constants) :]
        self._ordered = [constants[name] for name in names]
        self._compiled = None  # stays None in Triton's interpreter

    def run(self, grid: tuple[int, int, int], first: Tensor, *others: object) -> None:
        """Run the kernel on its arguments before the constants, on the device of the first one."""
        arguments = (first, *others, *self._ordered)
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            if self._compiled is not None:
                self._compiled[grid](*arguments)
                return
            # A fused multiply-add rounds once where the other backends round twice.
            self._compiled = self._kernel[grid](*arguments, num_warps=4, enable_fp_fusion=False)


class Launch(NamedTuple):
    """A kernel with its first argument, a table on the device, and the number of its programs."""

    kernel: CompiledKernel
    table: Tensor
    num_programs: int

    def run(self, *others: object) -> None:
        """Run the kernel on its arguments between the table and the constants."""
        if self.num_programs:
            self.kernel.run((self.num_programs, 1, 1), self.table, *others)


class TritonKernels(Kernels):
    """One launch perturbs or updates all alike tensors of a call, or draws or subtracts for one.

    Indices of rows that are out of range are not caught: that would wait for the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def perturb(
        self,
        entries: Distribution,
        weights: Sequence[Weight],
        key: int,
        scale: float,
        num_signs: int,
        memory: Tensor | None = None,
    ) -> Copies:
        if weights[0].rows is not None:
            return [
                self._perturb_rows(entries, weight, key, scale, num_signs) for weight in weights
            ]
        thetas = [weight.theta.contiguous() for weight in weights]
        parts = []
        offset = 0
        for theta, weight in zip(thetas, weights, strict=True):
            is_fp32 = weight.out_dtype == torch.float32
            # One kernel writes copies in fp32 and in one other dtype.
            kernel_dtype = theta.dtype if is_fp32 else weight.out_dtype
            parts.append(
                _Part(
                    constants=_perturb_constants(theta.dtype, kernel_dtype, num_signs),
                    parameter_id=weight.elements.parameter_id,
                    region=weight.elements.region,
                    address=theta.data_ptr(),
                    copy_offset=offset,
                    copy_is_fp32=is_fp32,
                )
            )
            offset += aligned(theta.numel() * weight.out_dtype.itemsize)
        num_bytes = bytes_of_copies(weights)
        if memory is None:
            memory = torch.empty(num_signs * num_bytes, dtype=torch.uint8, device=self._device)
        for launch in _launches(kernels.perturb_kernel, tuple(parts), entries, self._device):
            launch.run(None, memory, key, scale, num_bytes)
        copies = []
        for theta, weight, part in zip(thetas, weights, parts, strict=True):
            typed = memory.view(weight.out_dtype)
            of_weight = []
            for sign in range(num_signs):
                offset = (sign * num_bytes + part.copy_offset) // weight.out_dtype.itemsize
                of_weight.append(typed.as_strided(theta.shape, theta.stride(), offset))
            copies.append(of_weight)
        return copies

    def _perturb_rows(
        self, entries: Distribution, weight: Weight, key: int, scale: float, num_signs: int
    ) -> list[Tensor]:
        theta, elements, out_dtype, rows = weight
        assert rows is not None
        theta = theta.contiguous()
        rows = rows.contiguous()
        width = theta.shape[1]
        address = theta.data_ptr()
        start = elements.region.start
        if start:
            # The kernel counts rows from the first one of the parameter. That row need not be in
            # memory: only the rows that are asked for are read.
            rows = rows + start // width
            address -= start * theta.itemsize
        # A row that starts within a block can touch one more tile.
        per_block = PER_BLOCK[entries]
        first_row = Region.run(0 if width % per_block == 0 else per_block - 1, width)
        tiles_of_row = num_tiles(first_row, per_block, BLOCKS_OF_TILE[entries])
        part = _Part(
            constants=_perturb_constants(theta.dtype, out_dtype, num_signs),
            parameter_id=elements.parameter_id,
            region=first_row,
            address=address,
            tiles_of_row=tiles_of_row,
        )
        (of_one_row,) = _launches(kernels.perturb_kernel, (part,), entries, self._device)
        num_bytes = aligned(len(rows) * width * out_dtype.itemsize)
        memory = torch.empty(num_signs, num_bytes, dtype=torch.uint8, device=self._device)
        num_programs = len(rows) * tiles_of_row
        launch = of_one_row._replace(num_programs=num_programs)
        launch.run(rows, memory, key, scale, num_bytes)
        copies = memory.view(out_dtype)[:, : len(rows) * width]
        return [copy.view(len(rows), width) for copy in copies]

    def update(
        self,
        entries: Distribution,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        parts = []
        for target in targets:
            values, elements, *_ = target
            besides = _besides(target)
            constants = (
                ("dtype", values.dtype),
                ("low_dtype", besides.dtype),
                ("storage", _storage(values, precision)),
            )
            parts.append(
                _Part(
                    constants=constants,
                    parameter_id=elements.parameter_id,
                    region=elements.region,
                    address=values.data_ptr(),
                    low_address=besides.data_ptr(),
                    num_groups=0 if target.grid is None else target.grid.shape[1],
                )
            )
        packed = _words_on_device(pack_updates(updates).tobytes(), self._device)
        for launch in _launches(kernels.update_kernel, tuple(parts), entries, self._device):
            launch.run(packed, len(updates))

    def draw(
        self,
        entries: Distribution,
        parameter_id: int,
        keys: Sequence[int],
        region: Region,
    ) -> Tensor:
        num_rows = len(keys) * region.num_rows
        out = torch.empty(num_rows, region.width, device=self._device)
        per_block = PER_BLOCK[entries]
        num_blocks = BLOCKS_OF_TILE[entries]
        tiles_of_row = _tiles_of_row(region.width, per_block, num_blocks)
        kernel = _compiled(
            kernels.entries_kernel,
            (("distribution", entries), ("per_block", per_block), ("num_blocks", num_blocks)),
        )
        kernel.run(
            (num_rows, tiles_of_row, 1),  # only the first number may be above 65,535
            out,
            _words_on_device(np.array(keys, dtype=np.uint64).tobytes(), self._device),
            parameter_id,
            region.start,
            region.stride,
            region.width,
            region.num_rows,
        )
        return out

    def subtract(
        self,
        target: UpdateTarget,
        u: Tensor,
        b: Tensor,
        update: Update,
        precision: UpdatePrecision,
    ) -> None:
        u, b = checked_terms(target, u, b)
        values, elements, _, grid = target
        region = elements.region
        rows, columns = elements.rows_and_columns()
        low = _besides(target)
        parameter_width = elements.shape[1]
        starts = (region.start, 0 if region.num_rows == 1 else region.stride)
        tile_size = 4 * _BLOCKS_OF_SUBTRACTION
        kernel = _compiled(
            kernels.subtract_kernel,
            (
                ("storage", _storage(values, precision)),
                ("layout", "any" if any(start % 4 for start in starts) else "aligned"),
                ("unit", _unit(region.width, values.data_ptr(), low.data_ptr())),
                ("wraps_once", parameter_width >= tile_size),
                ("num_blocks", _BLOCKS_OF_SUBTRACTION),
            ),
            (values.dtype, values.data_ptr() % 16 == 0, low.dtype, low.data_ptr() % 16 == 0),
        )
        tiles_of_row = _tiles_of_row(region.width, 4, _BLOCKS_OF_SUBTRACTION)
        kernel.run(
            (region.num_rows * tiles_of_row, 1, 1),
            values,
            low,
            0 if grid is None else grid.shape[1],
            u,
            b,
            update.factor,
            update.key,
            elements.parameter_id,
            region.start,
            region.width,
            region.stride,
            tiles_of_row,
            len(u),
            parameter_width,
            rows.start,
            len(rows),
            columns.start,
            len(columns),
        )


class _Part(NamedTuple):
    """A tensor of a launch: a column of its table, but for FIRST_PROGRAM.

    `constants` are the constexpr arguments of the kernel that this tensor needs, by name.
    """

    constants: Constants
    parameter_id: int
    region: Region
    address: int
    copy_offset: int = 0
    copy_is_fp32: bool = False
    tiles_of_row: int = 0
    low_address: int = 0
    num_groups: int = 0


def _besides(target: UpdateTarget) -> Tensor:
    """Return what an update reads besides values: low bits, a grid, or, if nothing, the values."""
    if target.grid is not None:
        return target.grid
    return target.values if target.low is None else target.low


def _storage(values: Tensor, precision: UpdatePrecision) -> str:
    """Return how values are stored, as the kernels call it."""
    return {torch.float32: "fp32", torch.uint8: "codes"}.get(values.dtype, precision)


def _perturb_constants(dtype: torch.dtype, out_dtype: torch.dtype, num_signs: int) -> Constants:
    return (("dtype", dtype), ("out_dtype", out_dtype), ("two_signs", num_signs == 2))


@functools.lru_cache(maxsize=1024)
def _launches(
    kernel: Any, parts: Sequence[_Part], distribution: Distribution, device: torch.device
) -> list[Launch]:
    """Return a launch for each kind of parts: those that one compiled kernel serves.

    The launches are the same at each step for tensors that stay in place. Parts are of one kind if
    they need the same constants, layout and alignment. A parameter whose numbers are no multiples
    of 16 has a launch of its own, so that it slows down no other.
    """
    alike: dict[Constants, list[_Part]] = {}
    for part in parts:
        unit = _unit(part.region.size, part.address, part.copy_offset, part.low_address)
        is_aligned = _is_aligned(part.region, PER_BLOCK[distribution])
        if part.region.num_rows > 1:
            layout = "aligned rows" if is_aligned else "rows"
        else:
            layout = "aligned" if is_aligned else "any"
        kind = (*part.constants, ("layout", layout), ("unit", unit))
        alike.setdefault(kind, []).append(part)
    launches = []
    for kind, same in alike.items():
        # A kernel is compiled for each number of columns: a power of two, and at least 16.
        num_columns = max(16, 1 << (len(same) - 1).bit_length())
        constants = {name: TRITON_TYPES.get(value, value) for name, value in kind}
        constants["num_columns"] = num_columns
        constants["distribution"] = distribution
        constants["per_block"] = PER_BLOCK[distribution]
        constants["num_blocks"] = BLOCKS_OF_TILE[distribution]
        table, num_programs = _table(same, num_columns, distribution)
        table_on_device = on_device(torch.from_numpy(table), device)
        launches.append(Launch(CompiledKernel(kernel, constants), table_on_device, num_programs))
    return launches


def _table(
    parts: Sequence[_Part], num_columns: int, distribution: Distribution
) -> tuple[np.ndarray, int]:
    """Return the table of a launch, int64 [NUM_ROWS, num_columns], and its number of programs."""
    table = np.full((kernels.NUM_ROWS.value, num_columns), _NO_PROGRAM, dtype=np.int64)
    num_programs = 0
    for column, part in zip(table.T, parts, strict=False):
        # In the order of the table's rows (see `triton_kernels`).
        column[:] = (
            num_programs,
            part.parameter_id,
            part.region.size,
            part.address,
            part.region.start,
            part.region.width,
            part.region.stride,
            part.copy_offset,
            part.copy_is_fp32,
            part.tiles_of_row,
            part.low_address,
            part.num_groups,
        )
        num_programs += num_tiles(
            part.region, PER_BLOCK[distribution], BLOCKS_OF_TILE[distribution]
        )
    return table, num_programs


def num_tiles(region: Region, per_block: int, blocks_of_tile: int) -> int:
    """Return how many programs cover a region."""
    if region.size == 0:
        return 0
    if region.num_rows > 1 and not _is_aligned(region, per_block):
        # All blocks that a row may touch, as in `triton_kernels._elements_of_rectangle`.
        blocks_of_row = (region.width + 2 * (per_block - 1)) // per_block
        num_blocks = region.num_rows * blocks_of_row
    else:
        num_blocks = -(-(region.start % per_block + region.size) // per_block)
    return -(-num_blocks // blocks_of_tile)


def _is_aligned(region: Region, per_block: int) -> bool:
    """Return whether each row of a region begins where a block begins, and blocks fill the rows."""
    if region.num_rows == 1:
        return region.start % per_block == 0
    return not any(number % per_block for number in (region.start, region.width, region.stride))


def _tiles_of_row(width: int, per_block: int, blocks_of_tile: int) -> int:
    """Return how many programs cover a row that may begin at any element of a block."""
    return num_tiles(Region.run(per_block - 1, width), per_block, blocks_of_tile)


def _unit(*numbers: int) -> int:
    """Return 16 if all numbers are multiples of it, which makes a kernel faster, else 1."""
    return 1 if any(number % 16 for number in numbers) else 16


# All blocks of a step have the same updates and keys, so one copy to the GPU serves them all.
@functools.lru_cache(maxsize=8)
def _words_on_device(words: bytes, device: torch.device) -> Tensor:
    return on_device(torch.frombuffer(bytearray(words), dtype=torch.uint64), device)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return values
    # Pinned memory and non_blocking let the host go on before the copy is done.
    return values.pin_memory().to(device, non_blocking=True)


@functools.cache
def _compiled(
    kernel: Any, constants: Constants, of_tensors: tuple[Any, ...] = ()
) -> CompiledKernel:
    """Return a kernel with its constants, the same one at each call.

    Args:
        kernel: a function of `triton.jit`.
        constants: its last arguments, by name.
        of_tensors: the types of its tensors, and which begin at a multiple of 16 bytes, if they
            differ in that. A compiled kernel serves only those that are alike.
    """
    return CompiledKernel(kernel, dict(constants))
