"""What every noise backend offers; all that are exact give the same bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lezo_ds.noise.precision import STORAGE_DTYPES, UpdatePrecision

SeedAndCoefficient = tuple[int, float]

NoiseMode = Literal["exact", "fast"]
"""The same bits everywhere, or those of a GPU's approximations of logarithm, root, sine and cosine."""


class NoiseBackend(ABC):
    """Operations on z(seed, parameter, element) (see `lezo_ds.noise.gaussian`).

    Everywhere: `seed` is an unsigned 64-bit integer, `parameter_id` an unsigned 32-bit one, `start` the index
    of the first element in the unsharded, unpadded, flattened parameter, 0 to 2**40. Scales and coefficients
    are rounded to fp32. Tensors are fp32, bf16 or fp16. Wrong arguments raise ValueError.
    """

    def normal(self, seed: int, parameter_id: int, start: int, count: int, device: torch.device) -> Tensor:
        """Return z of elements [start, start + count): fp32 [count]."""
        check_range(seed, parameter_id, start, count)
        return self._normal(seed, parameter_id, start, count, device)

    def perturb(
        self, theta: Tensor, seed: int, parameter_id: int, scale: float, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return theta + scale z as a new tensor (MeZO: Malladi et al. 2023, algorithm 1).

        Computed in fp32, product and sum each rounded, then rounded to nearest.

        Args:
            theta: the whole parameter, any shape; the element index is the flat row-major one.
            seed: the step's seed.
            parameter_id: the parameter's id.
            scale: the perturbation scale, with its sign.
            out_dtype: of the result; theta's by default.

        """
        return self._perturbed(theta, None, seed, parameter_id, scale, out_dtype, 1)[0]

    def perturb_pair(
        self, theta: Tensor, seed: int, parameter_id: int, scale: float, out_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (theta + scale z, theta - scale z), z drawn once; the bits of two calls of `perturb`."""
        plus, minus = self._perturbed(theta, None, seed, parameter_id, scale, out_dtype, 2)
        return plus, minus

    def perturb_rows(
        self,
        theta: Tensor,
        rows: Tensor,
        seed: int,
        parameter_id: int,
        scale: float,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the given rows of `perturb(theta, ...)`, computing noise for those rows only.

        Args:
            theta: [num_rows, width].
            rows: int64 [n], each in [0, num_rows), in any order, with or without repeats.
            seed: the step's seed.
            parameter_id: the parameter's id.
            scale: the perturbation scale, with its sign.
            out_dtype: of the result; theta's by default.

        Returns:
            [n, width].

        """
        return self._perturbed(theta, rows, seed, parameter_id, scale, out_dtype, 1)[0]

    def perturb_rows_pair(
        self,
        theta: Tensor,
        rows: Tensor,
        seed: int,
        parameter_id: int,
        scale: float,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return `perturb_rows` with +scale and with -scale, z drawn once."""
        plus, minus = self._perturbed(theta, rows, seed, parameter_id, scale, out_dtype, 2)
        return plus, minus

    def update_(
        self,
        shard: Tensor,
        start: int,
        seed: int,
        parameter_id: int,
        coefficient: float,
        precision: UpdatePrecision,
        low: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> None:
        """Subtract coefficient z from the shard in place (MeZO: learning rate * projected gradient * z).

        Computed in fp32, product and difference each rounded, then stored by `precision`.

        Args:
            shard: contiguous [n], holding elements [start, start + n) of the parameter.
            start: index of the shard's first element.
            seed: the step's seed.
            parameter_id: the parameter's id.
            coefficient: what z is multiplied with.
            precision: how the result is stored (`lezo_ds.noise.precision`).
            low: contiguous int16 [n] from `split_master` if `precision` is "fp32_master" and the shard has
                16 bits; else None.
            sums: int64 [2] on the shard's device; numbers that are the `bit_sum`s of shard and
                low before and after, modulo 2**32, are added.

        """
        self._checked_update(shard, start, parameter_id, [(seed, coefficient)], precision, low, sums)

    def update_many_(
        self,
        shard: Tensor,
        start: int,
        parameter_id: int,
        steps: Sequence[SeedAndCoefficient],
        precision: UpdatePrecision,
        low: Tensor | None = None,
    ) -> None:
        """Apply `update_` for each (seed, coefficient) in order, bit for bit, in one pass over memory."""
        self._checked_update(shard, start, parameter_id, steps, precision, low, None)

    def _perturbed(
        self,
        theta: Tensor,
        rows: Tensor | None,
        seed: int,
        parameter_id: int,
        scale: float,
        out_dtype: torch.dtype | None,
        num_signs: int,
    ) -> list[Tensor]:
        """Return [theta + scale z], and theta - scale z of two signs, of the given rows or (None) of all."""
        out_dtype = out_dtype or theta.dtype
        check_perturb(theta, rows, out_dtype)
        check_range(seed, parameter_id, 0, theta.numel())
        shape = theta.shape if rows is None else torch.Size((len(rows), theta.shape[1]))
        outs = [torch.empty(shape, dtype=out_dtype, device=theta.device) for _ in range(num_signs)]
        rows = None if rows is None else rows.contiguous()
        self._perturb(theta.contiguous(), rows, seed, parameter_id, scale, outs)
        return outs

    def _checked_update(
        self,
        shard: Tensor,
        start: int,
        parameter_id: int,
        steps: Sequence[SeedAndCoefficient],
        precision: UpdatePrecision,
        low: Tensor | None,
        sums: Tensor | None,
    ) -> None:
        check_update(shard, precision, low)
        for seed, _ in steps:
            check_range(seed, parameter_id, start, shard.numel())
        self._update(shard, start, parameter_id, steps, precision, low, sums)

    @abstractmethod
    def _normal(self, seed: int, parameter_id: int, start: int, count: int, device: torch.device) -> Tensor:
        """As `normal`; arguments are checked."""

    @abstractmethod
    def _perturb(
        self,
        theta: Tensor,
        rows: Tensor | None,
        seed: int,
        parameter_id: int,
        scale: float,
        outs: Sequence[Tensor],
    ) -> None:
        """Fill outs[0] with theta + scale z and outs[1], where there is one, with theta - scale z.

        Arguments are checked, but for the values of `rows`; all tensors are contiguous.

        Raises:
            ValueError: theta is not on a device of this backend's, or (on CPUs only) has not all of the rows.
        """

    @abstractmethod
    def _update(
        self,
        shard: Tensor,
        start: int,
        parameter_id: int,
        steps: Sequence[SeedAndCoefficient],
        precision: UpdatePrecision,
        low: Tensor | None,
        sums: Tensor | None,
    ) -> None:
        """As `update_many_`; arguments are checked; `sums`, with one step only, as in `update_`."""


def check_range(seed: int, parameter_id: int, start: int, count: int) -> None:
    """Raise ValueError unless (seed, parameter id, elements) lie in the counter's range."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an unsigned 64-bit integer, got {seed}")
    if not 0 <= parameter_id < 2**32:
        raise ValueError(f"parameter_id must be an unsigned 32-bit integer, got {parameter_id}")
    if start < 0 or count < 0 or start + count > 2**40:
        raise ValueError(f"elements [{start}, {start + count}) must lie in [0, 2**40)")


def check_perturb(theta: Tensor, rows: Tensor | None, out_dtype: torch.dtype) -> None:
    """Raise ValueError unless theta, rows and the result's dtype are ones a backend can perturb."""
    if theta.dtype not in STORAGE_DTYPES or out_dtype not in STORAGE_DTYPES:
        raise ValueError(f"theta and result must be fp32, bf16 or fp16, got {theta.dtype} and {out_dtype}")
    if rows is not None and (theta.ndim != 2 or rows.ndim != 1 or rows.dtype != torch.int64):
        raise ValueError(
            f"rows need a 2-D theta and a 1-D int64 index, got {theta.ndim}-D and {rows.ndim}-D {rows.dtype}"
        )


def check_update(shard: Tensor, precision: UpdatePrecision, low: Tensor | None) -> None:
    """Raise ValueError unless shard and low are flat, contiguous and what `precision` needs."""
    if shard.dtype not in STORAGE_DTYPES or shard.ndim != 1 or not shard.is_contiguous():
        raise ValueError(
            f"shard must be flat, contiguous fp32, bf16 or fp16, got {shard.dtype} {shard.shape}"
        )
    if precision not in ("stochastic", "fp32_master", "nearest"):
        raise ValueError(f"unknown precision {precision!r}")
    if (low is not None) != (precision == "fp32_master" and shard.dtype != torch.float32):
        raise ValueError(
            f"low is for fp32_master over 16 bits only, and needed there; {precision}, {shard.dtype}"
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
