"""The operations on the noise z(key, parameter, element). All backends give the same bits."""

from __future__ import annotations

import functools
import logging
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lezo_ds.errors import UserError
from lezo_ds.zo.updates import Distribution, Update, UpdatePrecision

NOISE_VERSION = 1
"""Version of z(key, parameter, element) and of its use; it changes when any bit of either changes."""

logger = logging.getLogger(__name__)
_PACKED = np.dtype([("key", "<u8"), ("coefficient", "<f4"), ("factor", "<f4")])


class Weight(NamedTuple):
    """A parameter to perturb, or some rows of it."""

    theta: Tensor  # the full parameter, any shape; its elements are indexed in row-major order
    parameter_id: int  # unsigned 32-bit
    out_dtype: torch.dtype  # of the perturbed copies
    rows: Tensor | None = None  # int64 [n], in any order, with repeats; theta is then [num_rows, width]


class Shard(NamedTuple):
    """The elements [start, start + n) of a parameter, to update in place."""

    values: Tensor  # contiguous [n]
    start: int
    parameter_id: int
    low: Tensor | None = None  # contiguous int16 [n]: the low bits of `split_master`, with "fp32_master" only


class NoiseBackend(ABC):
    """Keys are unsigned 64-bit, elements 0 to 2**40, tensors fp32, bf16 or fp16; scales are taken as fp32."""

    # Whether one call for all parameters of a block is so much faster than a call for each, as it is where a
    # call is a kernel launch, that it is worth the memory for all their copies.
    takes_blocks: ClassVar[bool] = False

    @abstractmethod
    def draw(
        self,
        key: int,
        parameter_id: int,
        start: int,
        count: int,
        device: torch.device,
        distribution: Distribution = "normal",
    ) -> Tensor:
        """Return z of the elements [start, start + count): fp32 [count]."""

    def perturb(
        self,
        weights: Sequence[Weight],
        key: int,
        scales: Sequence[float],
        distribution: Distribution = "normal",
    ) -> list[list[Tensor]]:
        """Return theta + scale * z of each weight for each scale (MeZO: Malladi et al. 2023, algorithm 1).

        Product and sum are rounded to fp32, each on its own, and the result to nearest. A scale followed by
        its opposite shares one draw with it. A copy for scale 0 may be theta itself: do not write to it.
        """
        weights = [
            weight if weight.rows is None and weight.theta.is_contiguous() else _contiguous(weight)
            for weight in weights
        ]
        copies: list[list[Tensor]] = [[] for _ in weights]
        done = 0
        while weights and done < len(scales):
            scale, following = scales[done], scales[done + 1 : done + 2]
            if scale == 0:
                num_signs, results = 1, [[_unperturbed(weight)] for weight in weights]
            else:
                num_signs = 2 if tuple(following) == (-scale,) else 1
                results = self._perturb(weights, key, scale, num_signs, distribution)
            for copies_of_weight, result in zip(copies, results, strict=True):
                copies_of_weight += result
            done += num_signs
        return copies

    @abstractmethod
    def _perturb(
        self, weights: Sequence[Weight], key: int, scale: float, num_signs: int, distribution: Distribution
    ) -> list[list[Tensor]]:
        """Return theta + scale * z of each contiguous weight and, with two signs, theta - scale * z."""

    @abstractmethod
    def update_(
        self,
        shards: Sequence[Shard],
        updates: Sequence[Update],
        precision: UpdatePrecision,
        distribution: Distribution = "normal",
    ) -> None:
        """Apply the same updates to shards of one device, in order and in one pass over memory.

        Each update computes theta * factor - coefficient * z in fp32; both products and the difference are
        rounded on their own, and the result is stored by `precision`. Several updates in one call give the
        same bits as one call for each.
        """


def noise_backend(device: torch.device) -> NoiseBackend:
    """Return the fastest backend for a device. Without a C++ compiler, that of CPUs is plain PyTorch."""
    return _backend_of(device.type)


@functools.cache
def _backend_of(device_type: str) -> NoiseBackend:
    from lezo_ds.noise.cpu import BuildError, CpuNoise
    from lezo_ds.noise.eager import EagerNoise

    if device_type == "cuda":
        return _triton_noise()
    if device_type == "cpu":
        try:
            return CpuNoise()
        except BuildError as error:
            logger.warning(
                "the noise kernels for CPUs cannot be built, so slower PyTorch code gives the same results; "
                "install a C++ compiler (apt-get install g++, or conda install gxx): %s",
                error,
            )
    return EagerNoise()


def _triton_noise() -> NoiseBackend:
    try:
        from lezo_ds.noise.gpu import TritonNoise  # CPUs do not need Triton and often do not have it

        noise = TritonNoise()
        # The first launch builds Triton's launcher; a missing compiler must show now, not in a training step.
        noise.draw(key=0, parameter_id=0, start=0, count=1, device=torch.device("cuda"))
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
    """Return perturbed copies of a parameter as one tensor [n, *shape]: a view if their memory allows it."""
    first, *others = copies
    if not others:
        return first[None]
    if len(others) == 1 and first.is_contiguous() and others[0].is_contiguous():
        is_shared = first.untyped_storage().data_ptr() == others[0].untyped_storage().data_ptr()
        distance = others[0].storage_offset() - first.storage_offset()
        if is_shared and distance > 0:
            return first.as_strided((2, *first.shape), (distance, *first.stride()))
    return torch.stack(list(copies))


def _contiguous(weight: Weight) -> Weight:
    rows = None if weight.rows is None else weight.rows.contiguous()
    return weight._replace(theta=weight.theta.contiguous(), rows=rows)


def _unperturbed(weight: Weight) -> Tensor:
    theta = weight.theta if weight.rows is None else weight.theta[weight.rows]
    return theta.to(weight.out_dtype)
