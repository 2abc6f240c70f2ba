"""The operations that every noise backend offers. All backends give the same bits."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from lezo_ds.noise.precision import STORAGE_DTYPES
from lezo_ds.zo.distributions import Distribution
from lezo_ds.zo.precision import UpdatePrecision
from lezo_ds.zo.updates import Update

_Made = TypeVar("_Made")
_PACKED = np.dtype([("key", "<u8"), ("coefficient", "<f4"), ("factor", "<f4")])
_DISTRIBUTIONS = get_args(Distribution)
_PRECISIONS = get_args(UpdatePrecision)


def pack_updates(steps: Sequence[Update]) -> np.ndarray:
    """Return updates in the layout of the compiled kernels: uint64 key, fp32 coefficient and factor."""
    return np.array(list(steps), dtype=_PACKED)


class Whole(NamedTuple):
    """A parameter to perturb.

    Attributes:
        theta: the whole parameter, any shape; elements are indexed in row-major order.
        parameter_id: its id.
        out_dtype: dtype of its perturbed copies.
    """

    theta: Tensor
    parameter_id: int
    out_dtype: torch.dtype


class Shard(NamedTuple):
    """A part of a parameter to update.

    Attributes:
        values: contiguous [n], the elements [start, start + n) of the parameter.
        start: index of its first element.
        parameter_id: the parameter's id.
        low: contiguous int16 [n], the low bits that `split_master` returns. Required if the precision is
            "fp32_master" and `values` has 16 bits; otherwise None.
    """

    values: Tensor
    start: int
    parameter_id: int
    low: Tensor | None = None


def stacked(copies: Sequence[Tensor]) -> Tensor:
    """Return perturbed copies of a parameter as one tensor [n, *shape]: a view if their memory allows it.

    Args:
        copies: at least one, of one shape.
    """
    first, *others = copies
    if not others:
        return first[None]
    if len(others) == 1 and first.is_contiguous() and others[0].is_contiguous():
        is_shared = first.untyped_storage().data_ptr() == others[0].untyped_storage().data_ptr()
        distance = others[0].storage_offset() - first.storage_offset()
        if is_shared and distance > 0:
            return first.as_strided((2, *first.shape), (distance, *first.stride()))
    return torch.stack(list(copies))


class NoiseBackend(ABC):
    """Operations on the noise z(key, parameter, element), which `lezo_ds.noise.draws` defines.

    In all methods, `key` is an unsigned 64-bit integer, `parameter_id` is an unsigned 32-bit integer, and
    `start` is the index of the first element in the unsharded, unpadded, flattened parameter, 0 to 2**40.
    Scales, coefficients and factors are rounded to fp32. Tensors are fp32, bf16 or fp16. `distribution` is
    that of z.
    All methods raise ValueError for wrong arguments.

    Attributes:
        takes_blocks: whether one call for all parameters of a block is so much faster than a call for each,
            as it is where a call is a kernel launch, that it is worth the memory for all their copies.
    """

    takes_blocks: ClassVar[bool] = False

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
        check_distribution(distribution)
        check_key(key)
        check_range(parameter_id, start, count)
        return self._draw(distribution, key, parameter_id, start, count, device)

    def perturb(
        self,
        theta: Tensor,
        key: int,
        parameter_id: int,
        scales: Sequence[float],
        out_dtype: torch.dtype | None = None,
        distribution: Distribution = "normal",
    ) -> list[Tensor]:
        """Return theta + scale * z for each scale (MeZO: Malladi et al. 2023, algorithm 1).

        Product and sum are computed in fp32, each rounded on its own; the result is rounded to nearest.
        Two opposite scales share one draw of z. A scale of 0 draws no noise.

        Args:
            theta: the whole parameter, any shape; elements are indexed in row-major order.
            key: the key of the direction.
            parameter_id: the parameter's id.
            scales: the signed perturbation scales.
            out_dtype: dtype of the results; theta's by default.
            distribution: of z.

        Returns:
            One tensor of theta's shape per scale. For scale 0 it may be theta itself: do not write to it.

        """
        whole = Whole(theta, parameter_id, out_dtype or theta.dtype)
        (copies,) = self.perturb_all([whole], key, scales, distribution)
        return copies

    def perturb_all(
        self,
        wholes: Sequence[Whole],
        key: int,
        scales: Sequence[float],
        distribution: Distribution = "normal",
    ) -> list[list[Tensor]]:
        """Return what `perturb` returns for each parameter, all on one device."""
        check_distribution(distribution)
        check_key(key)
        for theta, parameter_id, out_dtype in wholes:
            check_perturb(theta, None, out_dtype)
            check_range(parameter_id, 0, theta.numel())
        if not (wholes and scales):
            return [[] for _ in wholes]
        wholes = [
            whole if whole.theta.is_contiguous() else whole._replace(theta=whole.theta.contiguous())
            for whole in wholes
        ]
        by_scale = _by_pairs(
            scales,
            lambda: [theta.to(out_dtype) for theta, _, out_dtype in wholes],
            lambda scale, num_signs: self._perturb_all(distribution, wholes, key, scale, num_signs),
        )
        return list(map(list, zip(*by_scale, strict=True)))

    def perturb_rows(
        self,
        theta: Tensor,
        rows: Tensor,
        key: int,
        parameter_id: int,
        scales: Sequence[float],
        out_dtype: torch.dtype | None = None,
        distribution: Distribution = "normal",
    ) -> list[Tensor]:
        """Return the given rows of `perturb(theta, ...)`, drawing noise for those rows only.

        Args:
            theta: [num_rows, width].
            rows: int64 [n], each in [0, num_rows), in any order, repeats allowed.
            key: the key of the direction.
            parameter_id: the parameter's id.
            scales: the signed perturbation scales.
            out_dtype: dtype of the results; theta's by default.
            distribution: of z.

        Returns:
            One tensor [n, width] per scale.

        """
        out_dtype = out_dtype or theta.dtype
        check_distribution(distribution)
        check_key(key)
        check_perturb(theta, rows, out_dtype)
        check_range(parameter_id, 0, theta.numel())
        theta, rows = theta.contiguous(), rows.contiguous()

        def perturbed(scale: float, num_signs: int) -> list[Tensor]:
            shape = (len(rows), theta.shape[1])
            outs = [torch.empty(shape, dtype=out_dtype, device=theta.device) for _ in range(num_signs)]
            self._perturb_rows(distribution, theta, rows, key, parameter_id, scale, outs)
            return outs

        return _by_pairs(scales, lambda: theta[rows].to(out_dtype), perturbed)

    def update_(
        self,
        shard: Tensor,
        start: int,
        parameter_id: int,
        steps: Sequence[Update],
        precision: UpdatePrecision,
        low: Tensor | None = None,
        distribution: Distribution = "normal",
    ) -> None:
        """Apply updates to a shard in place, in order and in one pass over memory.

        Each update computes theta * factor - coefficient * z in fp32. Both products and the difference are
        rounded on their own, and the result is stored by `precision`. Several updates in one call give the
        same bits as one call per update.

        Args:
            shard: contiguous [n], the elements [start, start + n) of the parameter.
            start: index of the shard's first element.
            parameter_id: the parameter's id.
            steps: the updates.
            precision: how results are stored (see `lezo_ds.noise.precision`).
            low: contiguous int16 [n], the low bits that `split_master` returns. Required if `precision` is
                "fp32_master" and the shard has 16 bits; otherwise None.
            distribution: of z.

        """
        self.update_all_([Shard(shard, start, parameter_id, low)], steps, precision, distribution)

    def update_all_(
        self,
        shards: Sequence[Shard],
        steps: Sequence[Update],
        precision: UpdatePrecision,
        distribution: Distribution = "normal",
    ) -> None:
        """Apply the same updates to several shards, all on one device; see `update_`."""
        check_distribution(distribution)
        for step in steps:
            check_key(step.key)
        for values, start, parameter_id, low in shards:
            check_update(values, precision, low)
            check_range(parameter_id, start, values.numel())
        if steps and shards:
            self._update_all(distribution, shards, steps, precision)

    @abstractmethod
    def _draw(
        self,
        distribution: Distribution,
        key: int,
        parameter_id: int,
        start: int,
        count: int,
        device: torch.device,
    ) -> Tensor:
        """Implement `draw`; the arguments are checked."""

    @abstractmethod
    def _perturb_all(
        self, distribution: Distribution, wholes: Sequence[Whole], key: int, scale: float, num_signs: int
    ) -> list[list[Tensor]]:
        """Return theta + scale * z of all parameters and, if there are two signs, theta - scale * z of all.

        The arguments are checked. There is at least one parameter, and all are contiguous.
        """

    @abstractmethod
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
        """Write rows of theta + scale * z to outs[0] and, with two outs, of theta - scale * z to outs[1].

        The arguments are checked, except for the values of `rows`. All tensors are contiguous.

        Raises:
            ValueError: theta is on a device that this backend does not serve, or (on CPUs only) a row is out
                of range.
        """

    @abstractmethod
    def _update_all(
        self,
        distribution: Distribution,
        shards: Sequence[Shard],
        steps: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        """Implement `update_all_`; the arguments are checked, and there is at least one shard and step."""


class OneByOneNoise(NoiseBackend):
    """A backend that perturbs one parameter at a time, whole parameters and rows alike."""

    def _perturb_all(
        self, distribution: Distribution, wholes: Sequence[Whole], key: int, scale: float, num_signs: int
    ) -> list[list[Tensor]]:
        made = []
        for theta, parameter_id, out_dtype in wholes:
            outs = [torch.empty_like(theta, dtype=out_dtype) for _ in range(num_signs)]
            self._perturb(distribution, theta, None, key, parameter_id, scale, outs)
            made.append(outs)
        return list(map(list, zip(*made, strict=True)))

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
        self._perturb(distribution, theta, rows, key, parameter_id, scale, outs)

    @abstractmethod
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
        """Do what `_perturb_rows` does for the given rows, or for all of theta if `rows` is None."""


def _by_pairs(
    scales: Sequence[float],
    unperturbed: Callable[[], _Made],
    perturbed: Callable[[float, int], Sequence[_Made]],
) -> list[_Made]:
    """Return what is made for each scale; two opposite scales are made together.

    Args:
        scales: the signed perturbation scales.
        unperturbed: makes it for scale 0.
        perturbed: is given a scale, and 2 to make it for that scale and its opposite, or 1.
    """
    found: dict[int, _Made] = {}
    for places in _opposite_pairs(tuple(scales)):
        scale = scales[places[0]]
        made = perturbed(scale, len(places)) if scale else [unperturbed()] * len(places)
        found |= zip(places, made, strict=True)
    return [found[place] for place in range(len(scales))]


@functools.lru_cache(maxsize=4)  # all parameters of a pass have the same scales
def _opposite_pairs(scales: tuple[float, ...]) -> list[list[int]]:
    """Return the indices of the scales in groups of two opposite scales, or of one without an opposite.

    >>> _opposite_pairs((1.0, 2.0, -1.0, 1.0))
    [[0, 2], [1], [3]]
    """
    groups: list[list[int]] = []
    for place, scale in enumerate(scales):
        opposite = (group for group in groups if len(group) == 1 and scales[group[0]] == -scale)
        if group := next(opposite, None):
            group.append(place)
        else:
            groups.append([place])
    return groups


def check_key(key: int) -> None:
    """Raise ValueError if the key of a direction is out of range."""
    if not 0 <= key < 2**64:
        raise ValueError(f"key must be an unsigned 64-bit integer, got {key}")


def check_range(parameter_id: int, start: int, count: int) -> None:
    """Raise ValueError if the parameter id or an element is outside the counter's range."""
    if not 0 <= parameter_id < 2**32:
        raise ValueError(f"parameter_id must be an unsigned 32-bit integer, got {parameter_id}")
    if start < 0 or count < 0 or start + count > 2**40:
        raise ValueError(f"elements [{start}, {start + count}) must lie in [0, 2**40)")


def check_distribution(distribution: Distribution) -> None:
    """Raise ValueError if there is no such distribution."""
    if distribution not in _DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {_DISTRIBUTIONS}, got {distribution!r}")


def check_perturb(theta: Tensor, rows: Tensor | None, out_dtype: torch.dtype) -> None:
    """Raise ValueError if a backend cannot perturb these rows of theta into that dtype."""
    if theta.dtype not in STORAGE_DTYPES or out_dtype not in STORAGE_DTYPES:
        raise ValueError(f"theta and result must be fp32, bf16 or fp16, got {theta.dtype} and {out_dtype}")
    if rows is not None and (theta.ndim != 2 or rows.ndim != 1 or rows.dtype != torch.int64):
        raise ValueError(
            f"rows need a 2-D theta and a 1-D int64 index, got {theta.ndim}-D and {rows.ndim}-D {rows.dtype}"
        )


def check_update(shard: Tensor, precision: UpdatePrecision, low: Tensor | None) -> None:
    """Raise ValueError if shard or low are not flat and contiguous, or not what `precision` requires."""
    if shard.dtype not in STORAGE_DTYPES or shard.ndim != 1 or not shard.is_contiguous():
        raise ValueError(
            f"shard must be flat, contiguous fp32, bf16 or fp16, got {shard.dtype} {shard.shape}"
        )
    if precision not in _PRECISIONS:
        raise ValueError(f"precision must be one of {_PRECISIONS}, got {precision!r}")
    if (low is not None) != (precision == "fp32_master" and shard.dtype != torch.float32):
        has_low = "no low bits" if low is None else "low bits"
        raise ValueError(
            f"fp32_master over 16 bits, and nothing else, needs low bits; "
            f"got {precision}, {shard.dtype} and {has_low}"
        )
    if low is not None and (
        low.dtype != torch.int16
        or low.shape != shard.shape
        or not low.is_contiguous()
        or low.device != shard.device
    ):
        raise ValueError(
            f"low must be contiguous int16 {shard.shape} on {shard.device}, got {low.dtype} {low.shape}"
        )
