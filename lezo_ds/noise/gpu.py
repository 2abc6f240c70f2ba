"""The noise operations for CUDA devices, with Triton."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from lezo_ds.noise import NoiseBackend, Region, UpdateTarget, Weight, pack_updates
from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.reference import PER_BLOCK
from lezo_ds.zo.laws import Distribution
from lezo_ds.zo.updates import Update, UpdatePrecision

# Elements of one program, as in `triton_kernels._tile`; no bit depends on it.
_TILE: dict[Distribution, int] = {"normal": 512 * 4, "rademacher": 32 * 128}
_ALIGNMENT = (
    512  # of copies in bytes, like that of torch's allocator: matrix products may depend on it
)
_TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Launch:
    """A kernel with the number of its programs and its last arguments, which are the same in all runs.

    Only in the first run does Triton choose the compiled kernel, which takes longer than the launch. It goes
    by types, and by which addresses and integers are multiples of 16 unless `do_not_specialize` excepts them;
    runs of one launch must not differ in these.
    """

    def __init__(
        self, kernel: Any, num_programs: int, constants: Mapping[str, Any], num_warps: int = 4
    ) -> None:
        self.kernel, self.num_programs, self.constants = kernel, num_programs, constants
        self._ordered = [constants[name] for name in kernel.arg_names[-len(constants) :]]
        self._num_warps, self._compiled = num_warps, None

    def run(self, first: Tensor, *others: object) -> None:
        """Run the kernel on its arguments before the constants, on the device of the first."""
        if self.num_programs == 0:
            return
        grid, arguments = (self.num_programs, 1, 1), (first, *others, *self._ordered)
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            if self._compiled is not None:
                self._compiled[grid](*arguments)
            else:
                # A fused multiply-add rounds once where the other backends round twice.
                options = {"num_warps": self._num_warps, "enable_fp_fusion": False}
                self._compiled = self.kernel[grid](
                    *arguments, **options
                )  # None in Triton's interpreter


class TritonNoise(NoiseBackend):
    """One launch perturbs or updates all alike tensors of a call. Rows out of range are not caught."""

    takes_blocks = True

    def _perturb(
        self,
        weights: Sequence[Weight],
        key: int,
        scale: float,
        num_signs: int,
    ) -> list[list[Tensor]]:
        if weights[0].rows is not None:
            return [
                _perturb_rows(weight, key, scale, num_signs, self.law.entries) for weight in weights
            ]
        thetas = [weight.theta.contiguous() for weight in weights]
        facts = [
            (
                theta.data_ptr(),
                theta.shape,
                theta.dtype,
                weight.parameter_id,
                weight.out_dtype,
                weight.region,
            )
            for theta, weight in zip(thetas, weights, strict=True)
        ]
        device = thetas[0].device
        num_bytes, views, launches = _copies(tuple(facts), num_signs, self.law.entries, device)
        # All copies in one piece of memory: those of plus, then those of minus.
        out = torch.empty(num_signs * num_bytes, dtype=torch.uint8, device=device)
        for table, launch in launches:
            launch.run(table, None, out, key, scale, num_bytes)
        of_dtype = {dtype: out.view(dtype) for dtype in {weight.out_dtype for weight in weights}}
        return [
            [of_dtype[dtype].as_strided(*view) for dtype, *view in of_weight] for of_weight in views
        ]

    def update_(
        self,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        if not (targets and updates):
            return
        parts = []
        for values, region, parameter_id, low in targets:
            stored = "nearest" if values.dtype == torch.float32 else precision
            constants = (("dtype", values.dtype), ("precision", stored))
            addresses = values.data_ptr(), 0 if low is None else low.data_ptr()
            parts.append((constants, parameter_id, values.numel(), *addresses, region, 0))
        device = targets[0].values.device
        packed = _updates_on_device(pack_updates(updates).tobytes(), device)
        for table, launch in _launches("update_kernel", tuple(parts), self.law.entries, device):
            launch.run(table, packed, len(updates))


def _perturb_rows(
    weight: Weight, key: int, scale: float, num_signs: int, distribution: Distribution
) -> list[Tensor]:
    theta, parameter_id, out_dtype, rows, region = weight
    assert rows is not None
    theta, rows, width = theta.contiguous(), rows.contiguous(), theta.shape[1]
    address = theta.data_ptr()
    if region.start:  # the kernel counts rows from the first one of the parameter
        rows, address = rows + region.start // width, address - region.start * theta.itemsize
    # A row that starts within a block can touch one more tile.
    start = 0 if width % PER_BLOCK[distribution] == 0 else PER_BLOCK[distribution] - 1
    constants = (("dtype", theta.dtype), ("out_dtype", out_dtype), ("two_signs", num_signs == 2))
    num_tiles = _num_tiles(distribution, Region(start), width)
    part = (constants, parameter_id, width, address, 0, Region(start), num_tiles)
    ((table, of_row),) = _launches("perturb_kernel", (part,), distribution, theta.device)
    num_bytes = _aligned(len(rows) * width * out_dtype.itemsize)
    out = torch.empty(num_signs, num_bytes, dtype=torch.uint8, device=theta.device)
    launch = Launch(of_row.kernel, len(rows) * num_tiles, of_row.constants)
    launch.run(table, rows, out, key, scale, num_bytes)
    return [copy.view(out_dtype)[: len(rows) * width].view(len(rows), width) for copy in out]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _num_tiles(distribution: Distribution, region: Region, count: int) -> int:
    """Return how many programs cover a part of `count` elements."""
    per_block = PER_BLOCK[distribution]
    covered = region.start % per_block + count if count else 0
    if region.width:  # all blocks that a row may touch, as in `triton_kernels._tile_of_rows`
        covered = (
            count // region.width * ((region.width + 2 * (per_block - 1)) // per_block) * per_block
        )
    return -(-covered // _TILE[distribution])


# Weights that stay where they are have the same copies and tables at each step.
@functools.lru_cache(maxsize=1024)
def _copies(
    facts: Sequence[tuple[int, torch.Size, torch.dtype, int, torch.dtype, Region]],
    num_signs: int,
    distribution: Distribution,
    device: torch.device,
) -> tuple[int, list[list[Any]], list[tuple[Tensor, Launch]]]:
    """Return the bytes of the copies of one sign, (dtype, *view) of the copies of each weight, and launches.

    The facts of a weight are address, shape, dtype, parameter id, dtype of its copies, and region.
    """
    parts, offsets, end = [], [], 0
    for address, shape, dtype, parameter_id, out_dtype, region in facts:
        is_fp32 = out_dtype == torch.float32
        stored = (
            "out_dtype",
            dtype if is_fp32 else out_dtype,
        )  # one kernel writes fp32 and another dtype
        constants = (("dtype", dtype), stored, ("two_signs", num_signs == 2))
        parts.append((constants, parameter_id, shape.numel(), address, end, region, is_fp32))
        offsets.append(end)
        end += _aligned(shape.numel() * out_dtype.itemsize)
    views = []
    for (_, shape, _, _, dtype, _), offset in zip(facts, offsets, strict=True):
        strides = torch.empty(shape, device="meta").stride()
        firsts = [(sign * end + offset) // dtype.itemsize for sign in range(num_signs)]
        views.append([(dtype, shape, strides, first) for first in firsts])
    return end, views, _launches("perturb_kernel", tuple(parts), distribution, device)


@functools.lru_cache(maxsize=1024)
def _launches(
    kernel: str, parts: Sequence[tuple[Any, ...]], distribution: Distribution, device: torch.device
) -> list[tuple[Tensor, Launch]]:
    """Return a table and a launch for each kind of parts: those that one compiled kernel serves.

    A part is (constants of the kernel, parameter id, number of elements, address, fifth field, region, sixth
    field); see `triton_kernels._part`.
    """
    alike: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
    for constants, parameter_id, count, address, other, region, last in parts:
        unit = 16 if count % 16 == address % 16 == other % 16 == 0 else 1
        layout = (
            "rows"
            if region.width
            else "aligned"
            if region.start % PER_BLOCK[distribution] == 0
            else "any"
        )
        kind = (*constants, ("layout", layout), ("unit", unit))
        num_tiles = _num_tiles(distribution, region, count)
        alike.setdefault(kind, []).append(
            (num_tiles, parameter_id, count, address, other, last, *region)
        )
    launches = []
    for kind, columns in alike.items():
        num_columns = max(
            16, 1 << (len(columns) - 1).bit_length()
        )  # a kernel is compiled for each number
        table = np.full(
            (9, num_columns), 1 << 62, dtype=np.int64
        )  # more than any number of programs
        table[:, : len(columns)] = np.array(columns, dtype=np.int64).T
        ends = np.cumsum(table[0, : len(columns)])
        table[0, : len(columns)] = [0, *ends[:-1]]
        constants = {name: _TRITON_TYPES.get(value, value) for name, value in kind}
        constants |= {"num_columns": num_columns, "distribution": distribution}
        launch = Launch(getattr(kernels, kernel), int(ends[-1]), constants)
        launches.append((_on_device(torch.from_numpy(table), device), launch))
    return launches


# All blocks of a step have the same updates, so one copy to the GPU serves them all.
@functools.lru_cache(maxsize=4)
def _updates_on_device(updates: bytes, device: torch.device) -> Tensor:
    return _on_device(torch.frombuffer(bytearray(updates), dtype=torch.uint64), device)


def _on_device(values: Tensor, device: torch.device) -> Tensor:
    # Pinned memory and non_blocking let the host go on before the copy is done.
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
