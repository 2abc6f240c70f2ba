"""Noise z as a pure function of (key, parameter, element), and the kernels that draw and apply it.

An element's number depends on nothing but the key, the parameter's id and the element's index in
the full parameter. A rank with a slice or a rectangle of a parameter draws the numbers of its own
elements, and z is never stored, sent or drawn as a whole.

The generator gives numbers in blocks of consecutive elements (see `philox`):

    element        0  1  2  3 | 4  5  6  7 | ...      normal: a block of 4 elements
    block               0     |      1     | ...      rademacher: a block of 128

Each kind of device has one `Kernels`, which all perturbation laws share:

    perturb     theta, key, scale           ->  theta + scale * z, a copy
    update      theta, (key, c), ...        ->  theta - c * z, in place
    draw        keys                        ->  rows of numbers
    subtract    theta, u, b                 ->  theta - (u_1 b_1 + u_2 b_2 + ...), in place

Two programs compute the same bits: `cpu` in C++ and `gpu` in Triton. They round every fp32
operation on its own, as IEEE 754 says, so journals may be replayed on either. docs/file-formats.md
has the formulas. Tests compare both programs with the formulas in plain PyTorch.

An update is far below half a unit in the last place of most 16-bit weights, so rounding to nearest
would lose it. Two exact methods keep it: stochastic rounding with a dither that can be replayed,
and 16 low bits in addition to the 16-bit value (`low_bits`). Codes of 8 bits are always rounded at
random, to a neighbor in the grid of their group.
"""

from __future__ import annotations

import functools
import math
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lezo_ds.errors import UserError
from lezo_ds.zo.laws import Distribution
from lezo_ds.zo.updates import Update, UpdatePrecision

NOISE_VERSION = 1
"""Version of z(key, parameter, element) and of its use. It changes when any bit of either does."""


class Region(NamedTuple):
    """A rectangle of the elements of a parameter, counted in row-major order.

    Its element (i, j) is element start + i * stride + j of the parameter. For example, columns 2 to
    4 of a parameter of 3 rows and 6 columns are Region(2, 3, 3, 6):

         0  1 [ 2  3  4] 5
         6  7 [ 8  9 10] 11
        12 13 [14 15 16] 17

    Attributes:
        start: index of its first element.
        num_rows: 1 for a run of elements, however long.
        width: number of elements of a row.
        stride: distance of the first elements of two rows.
    """

    start: int
    num_rows: int
    width: int
    stride: int

    @classmethod
    def run(cls, start: int, count: int) -> Region:
        """Return `count` elements from `start` on."""
        return cls(start, 1, count, count)

    @property
    def size(self) -> int:
        """Number of its elements."""
        return self.num_rows * self.width

    def indices(self, first: int, last: int, device: torch.device) -> Tensor:
        """Return where its elements `first` to `last` - 1 lie in the parameter: int64 [n]."""
        positions = torch.arange(first, last, device=device)
        if self.num_rows > 1:
            rows = positions // self.width
            positions = rows * self.stride + positions % self.width
        return positions + self.start


class Elements(NamedTuple):
    """Some elements of one parameter: those that a rank stores, or that a module computes with.

    Attributes:
        parameter_id: unsigned 32-bit; it selects the parameter's noise.
        shape: of the full parameter.
        region: which of its elements.
    """

    parameter_id: int
    shape: tuple[int, ...]
    region: Region

    @classmethod
    def all_of(cls, parameter_id: int, shape: Sequence[int]) -> Elements:
        """Return all elements of a parameter."""
        return cls(parameter_id, tuple(shape), Region.run(0, math.prod(shape)))

    def rows_and_columns(self) -> tuple[range, range]:
        """Return the rows and the columns of a matrix in which its elements lie."""
        start, num_rows, width, stride = self.region
        num_columns = self.shape[1]
        last = start + (num_rows - 1) * stride + width - 1
        rows = range(start // num_columns, last // num_columns + 1)
        columns = range(num_columns)
        if num_rows > 1 or len(rows) == 1:
            first_column = start % num_columns
            columns = range(first_column, min(first_column + width, num_columns))
        return rows, columns


class Weight(NamedTuple):
    """A parameter to perturb, or some rows of it.

    Attributes:
        theta: the elements, of any shape and strides.
        elements: which they are.
        out_dtype: dtype of the perturbed copies.
        rows: int64 [n], indices of rows of theta [num_rows, width] in any order, also repeated.
            The copies then have only these rows, and the region must be of whole rows.
    """

    theta: Tensor
    elements: Elements
    out_dtype: torch.dtype
    rows: Tensor | None = None


Copies = list[list[Tensor]]
"""For each weight, its perturbed copies, each of theta's shape or of the rows."""


_ALIGNMENT = 512
"""Of copies, in bytes, like that of torch's allocator: matrix products may depend on it."""


def aligned(num_bytes: int) -> int:
    """Round a number of bytes up to a multiple of the alignment of copies."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def bytes_of_copies(weights: Sequence[Weight]) -> int:
    """Return what one copy of each weight takes in memory. The copies lie one after the other."""
    return sum(aligned(weight.theta.numel() * weight.out_dtype.itemsize) for weight in weights)


class UpdateTarget(NamedTuple):
    """What an update changes in place: elements that a rank stores.

    Attributes:
        values: contiguous [n].
        elements: which they are.
        low: contiguous int16 [n], the low bits of `low_bits.split_master`. Only 16-bit values
            that are stored as "fp32_master" have them.
        grid: contiguous [2, groups] of any dtype, of values that are codes of 8 bits (uint8). Code
            i stands for code * grid[0, i // 64] + grid[1, i // 64]: a step and a minimum.
    """

    values: Tensor
    elements: Elements
    low: Tensor | None = None
    grid: Tensor | None = None


class Kernels(ABC):
    """What one kind of device computes with z. All kinds compute the same bits.

    Element indices are 0 to 2**40. Tensors are on the device.
    """

    @abstractmethod
    def perturb(
        self,
        entries: Distribution,
        weights: Sequence[Weight],
        key: int,
        scale: float,
        num_signs: int,
        memory: Tensor | None = None,
    ) -> Copies:
        """Return theta + scale * z of each weight and, with two signs, theta - scale * z.

        Product and sum are rounded to fp32, each on its own, and then to the copy's dtype.

        Args:
            entries: the distribution of the numbers.
            weights: whole ones, or some rows of each.
            key: of the direction.
            scale: not 0.
            num_signs: 1 or 2.
            memory: uint8 [at least num_signs * bytes_of_copies(weights)], where the copies of whole
                weights are written; None allocates it. plus is theta + scale * z, and minus the
                other:

                    plus of weight 0 | plus of weight 1 | ... | minus of weight 0 | ...
                    <-------- bytes_of_copies(weights) ------>
        """

    @abstractmethod
    def update(
        self,
        entries: Distribution,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        """Apply the same updates to all targets, in order: theta * factor - coefficient * z.

        Both products and the difference are rounded to fp32, each on its own. The result is stored
        before the next update, so the bits are those of one call for each. There is at least one
        target, and one update.

        A code moves by (theta * (factor - 1) - coefficient * z) / step, of which the fraction is
        rounded at random, whatever the precision. It stays in 0 to 255.
        """

    @abstractmethod
    def draw(
        self,
        entries: Distribution,
        parameter_id: int,
        keys: Sequence[int],
        region: Region,
    ) -> Tensor:
        """Return a rectangle of each key's numbers: fp32 [keys * num_rows, width].

        Args:
            entries: the distribution of the numbers.
            parameter_id: unsigned 32-bit.
            keys: of the directions.
            region: which numbers.
        """

    @abstractmethod
    def subtract(
        self,
        target: UpdateTarget,
        u: Tensor,
        b: Tensor,
        update: Update,
        precision: UpdatePrecision,
    ) -> None:
        """Change elements of a matrix in place: theta * factor - delta, each of them rounded once.

        delta[i, j] is the sum over terms t of u[t, i] * b[t, j]. Every product and every sum is
        rounded to fp32 on its own, in the order of the terms.

        Args:
            target: elements of a matrix.
            u: fp32 [terms, rows in which the elements lie].
            b: fp32 [terms, columns in which they lie].
            update: has the factor, and the key of the words by which 16-bit values are rounded at
                random. The terms have its coefficient.
            precision: how 16-bit values are stored.

        Raises:
            UserError: a user-defined law gives u or b of another shape, dtype or device.
        """


def checked_terms(target: UpdateTarget, u: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return u and b of `Kernels.subtract`, contiguous, or raise its UserError."""
    rows, columns = target.elements.rows_and_columns()
    device = target.values.device
    for name, values, lines in (("u", u, rows), ("b", b, columns)):
        shape = (len(u), len(lines))
        if (values.dtype, values.shape, values.device) != (torch.float32, shape, device):
            raise UserError(
                f"{name} of Kernels.subtract is {values.dtype} {list(values.shape)} on "
                f"{values.device}, expected torch.float32 {list(shape)} on {device}",
                fix="correct Directions.update of the law that zo.law names",
            )
    # The kernels read addresses: a transposed or expanded tensor has others.
    return u.contiguous(), b.contiguous()


class Updater(ABC):
    """What shards need of a law."""

    @abstractmethod
    def update(
        self,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        """Apply the same updates to all targets, in order: theta * factor - coefficient * z.

        Args:
            targets: on one device, at least one.
            updates: of one step or of many, at least one.
            precision: how 16-bit values are stored.
        """


@functools.cache
def kernels_of(device: torch.device) -> Kernels:
    """Return the kernels of a device, the same ones at each call.

    Raises:
        UserError: they cannot be built here.
    """
    if device.type == "cuda":
        return _triton_kernels(device)
    from lezo_ds.noise.cpu import CpuKernels

    return CpuKernels()


def _triton_kernels(device: torch.device) -> Kernels:
    if torch.version.hip is not None:  # a ROCm build of torch calls AMD GPUs "cuda", too
        raise UserError(
            f"this build of PyTorch is for AMD GPUs (ROCm {torch.version.hip}), which lezo_ds does "
            "not support: its kernels contain NVIDIA instructions",
            fix="use a machine with NVIDIA GPUs, or set DS_ACCELERATOR=cpu",
        )
    try:
        # CPUs do not need Triton, and many of their installations do not have it.
        from lezo_ds.noise.gpu import TritonKernels

        kernels = TritonKernels(device)
        # The first launch builds Triton's launcher: a missing compiler must show now, not in a
        # training step.
        target = UpdateTarget(torch.zeros(1, device=device), Elements.all_of(0, [1]))
        kernels.update("normal", [target], [Update(key=0, coefficient=1.0)], "stochastic")
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        # Triton compiles its launcher with a C compiler, and writes it to its cache.
        raise UserError(
            f"the noise kernels cannot run on this GPU: {type(error).__name__}: {error}",
            fix="check with nvidia-smi that the GPU is there and has free memory; pip install "
            "triton; apt-get install gcc python3-dev, or conda install gcc; set TRITON_CACHE_DIR "
            "to a folder with space that you may write to",
        ) from error
    return kernels


_PACKED_UPDATE = np.dtype([("key", "<u8"), ("coefficient", "<f4"), ("factor", "<f4")])


def pack_updates(updates: Sequence[Update]) -> np.ndarray:
    """Return updates as the compiled kernels read them, 16 bytes each.

    Bytes 0 to 7 are the key (uint64), 8 to 11 the coefficient and 12 to 15 the factor (fp32).
    """
    return np.array([update[:3] for update in updates], dtype=_PACKED_UPDATE)
