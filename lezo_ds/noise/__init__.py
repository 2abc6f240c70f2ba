"""Noise z as a pure function of (key, parameter, element), and the operations that use it on each device."""

from __future__ import annotations

import functools
import logging
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lezo_ds.errors import UserError
from lezo_ds.zo.laws import PerturbationLaw
from lezo_ds.zo.updates import Update, UpdatePrecision

_CPU = torch.device("cpu")

NOISE_VERSION = 1
"""Version of z(key, parameter, element) and of its use; it changes when any bit of either changes."""

_PACKED = np.dtype([("key", "<u8"), ("coefficient", "<f4"), ("factor", "<f4")])


class Region(NamedTuple):
    """Where a part of a parameter lies: element (i, j) has the index start + i * stride + j.

    It is a rectangle whose rows have `width` elements. Elements are counted in the full parameter's row-major
    order. With width 0, the part is one row, however long.
    """

    start: int = 0
    width: int = 0
    stride: int = 0

    def rows(self, count: int) -> tuple[int, int, int]:
        """Return number of rows, width and stride of a part of `count` elements."""
        return (count // self.width, self.width, self.stride) if self.width else (1, count, count)


ALL = Region()
"""The region of a full parameter."""


class Weight(NamedTuple):
    """A parameter to perturb, or some rows of it."""

    theta: Tensor  # the parameter, or the rectangle of it that `region` describes
    parameter_id: int  # unsigned 32-bit
    out_dtype: torch.dtype  # of the perturbed copies
    rows: Tensor | None = (
        None  # int64 [n] of theta [num_rows, width], in any order; theta has whole rows
    )
    region: Region = ALL


class UpdateTarget(NamedTuple):
    """The part of a parameter that a rank has, to update in place."""

    values: Tensor  # contiguous [n]
    region: Region
    parameter_id: int
    low: Tensor | None = (
        None  # contiguous int16 [n]: the low bits of `split_master`, with "fp32_master" only
    )


class NoiseBackend(ABC):
    """The operations of one perturbation law on the tensors of one device.

    All backends compute the same bits. Keys are unsigned 64-bit, elements 0 to 2**40, scales fp32.
    """

    # Whether one call for all weights of a block is worth the memory for all their copies.
    takes_blocks = False

    def __init__(self, law: PerturbationLaw, device: torch.device = _CPU) -> None:
        self.law = law
        self.device = device

    def draw(
        self,
        key: int,
        parameter_id: int,
        start: int,
        count: int,
    ) -> Tensor:
        """Return z of the elements [start, start + count): fp32 [count]."""
        values = torch.zeros(count, device=self.device)
        target = UpdateTarget(values, Region(start), parameter_id)
        self.update_([target], [Update(key, -1.0)], precision="stochastic")
        return values

    def perturb(
        self,
        weights: Sequence[Weight],
        key: int,
        scales: Sequence[float],
    ) -> list[list[Tensor]]:
        """Return theta + scale * z of each weight for each scale (MeZO: Malladi et al. 2023, algorithm 1).

        Product and sum are rounded to fp32, each on its own. A scale followed by its opposite shares one draw
        with it. A copy for scale 0 may be theta itself: do not write to it.
        """
        copies: list[list[Tensor]] = [[] for _ in weights]
        done = 0
        while weights and done < len(scales):
            scale, num_signs = scales[done], 1
            if scale == 0:
                results = [
                    [(theta if rows is None else theta[rows]).to(out_dtype)]
                    for theta, _, out_dtype, rows, _ in weights
                ]
            else:
                num_signs += tuple(scales[done + 1 : done + 2]) == (-scale,)
                results = self._perturb(weights, key, scale, num_signs)
            for copies_of_weight, result in zip(copies, results, strict=True):
                copies_of_weight += result
            done += num_signs
        return copies

    @abstractmethod
    def _perturb(
        self,
        weights: Sequence[Weight],
        key: int,
        scale: float,
        num_signs: int,
    ) -> list[list[Tensor]]:
        """Return theta + scale * z of each weight and, if there are two signs, theta - scale * z."""

    @abstractmethod
    def update_(
        self,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        """Apply the same updates to targets on the backend's device: theta * factor - coefficient * z, in order.

        Both products and the difference are rounded to fp32, each on its own, and each update is stored by
        `precision`: the bits are those of one call for each.
        """


@functools.cache
def noise_backend(device: torch.device, law: PerturbationLaw) -> NoiseBackend:
    """Return the fastest backend of a law for a device. For CPUs without a C++ compiler, it is plain PyTorch."""
    if device.type == "cuda":
        return _triton_noise(device, law)
    from lezo_ds.noise.cpu import CpuNoise
    from lezo_ds.noise.reference import EagerNoise

    try:
        return CpuNoise(law)
    except (OSError, RuntimeError) as error:
        logging.getLogger(__name__).warning(
            "the noise kernels for CPUs cannot be built, so slower PyTorch code gives the same results; "
            "install a C++ compiler (apt-get install g++, or conda install gxx): %s",
            error,
        )
    return EagerNoise(law)


def _triton_noise(device: torch.device, law: PerturbationLaw) -> NoiseBackend:
    if torch.version.hip is not None:  # a ROCm build of torch calls AMD GPUs "cuda", too
        raise UserError(
            f"this build of PyTorch is for AMD GPUs (ROCm {torch.version.hip}), which lezo_ds does "
            "not support: its kernels contain NVIDIA instructions",
            fix="use a machine with NVIDIA GPUs, or set DS_ACCELERATOR=cpu",
        )
    try:
        from lezo_ds.noise.gpu import (
            TritonNoise,
        )  # CPUs do not need Triton and often do not have it

        noise = TritonNoise(law, device)
        # The first launch builds Triton's launcher; a missing compiler must show now, not in a training step.
        noise.draw(0, 0, 0, 1)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise UserError(
            f"Triton needs a C compiler and Python's headers; {type(error).__name__}: {error}",
            fix="pip install triton; apt-get install gcc python3-dev, or conda install gcc",
        ) from error
    return noise


def pack_updates(updates: Sequence[Update]) -> np.ndarray:
    """Return updates in the layout of the compiled kernels: uint64 key, fp32 coefficient and factor."""
    return np.array(list(updates), dtype=_PACKED)


def stacked(copies: Sequence[Tensor]) -> Tensor:
    """Return perturbed copies of a parameter as one tensor [n, *shape]: a view if one kernel wrote them."""
    first, last = copies[0], copies[-1]
    distance = last.storage_offset() - first.storage_offset()
    is_shared = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    if len(copies) == 1 or (len(copies) == 2 and is_shared and distance > 0):
        return first.as_strided((len(copies), *first.shape), (distance, *first.stride()))
    return torch.stack(list(copies))
