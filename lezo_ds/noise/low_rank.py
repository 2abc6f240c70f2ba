"""Directions of low rank: their vectors a and b, and updates that round once a step.

A step's terms are the outer products of all its directions, direction by direction. For the
elements (i, j) of a matrix that a rank stores, an update needs a[i] and b[j] of each term:

             columns 3 to 5                b  [terms, 3]
             |  |  |
    row 1  . x  x  x     a [terms, 2]      delta[i, j] = sum over terms t of u[t, i] * b[t, j]
    row 2  . x  x  x                       u[t, i]     = coefficient[t] * a[t, i]

Every product and every sum is rounded to fp32 on its own, in the order of the terms. So all
programs and all layouts give the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lezo_ds.noise import Region, UpdateTarget
from lezo_ds.zo.laws import FIRST_OF_COLUMNS, LowRankLaw
from lezo_ds.zo.updates import Update, UpdatePrecision


class Matrix(NamedTuple):
    """A matrix of which a rank has some elements.

    Attributes:
        parameter_id: unsigned 32-bit.
        num_rows, num_columns: of the full parameter.
        rows, columns: those of the rank's elements.
    """

    parameter_id: int
    num_rows: int
    num_columns: int
    rows: range
    columns: range

    @classmethod
    def of(cls, parameter_id: int, shape: Sequence[int], region: Region, count: int) -> Matrix:
        """Return the matrix of `count` elements that lie in `region` of a parameter [*shape]."""
        num_rows, num_columns = shape
        rows_of_region, width, stride = region.rows(count)
        last = region.start + (rows_of_region - 1) * stride + width - 1
        rows = range(region.start // num_columns, last // num_columns + 1)
        columns = range(num_columns)
        if rows_of_region > 1 or len(rows) == 1:
            first_column = region.start % num_columns
            columns = range(first_column, min(first_column + width, num_columns))
        return cls(parameter_id, num_rows, num_columns, rows, columns)


class Subtraction(NamedTuple):
    """What a kernel subtracts from the elements of one target: theta * factor - delta.

    Attributes:
        target: whose elements change in place.
        matrix: where they lie.
        rows: u, fp32 [terms, len(matrix.rows)].
        columns: b, fp32 [terms, len(matrix.columns)].
        factor: rounded to fp32.
        dither_key: of the words by which 16-bit values are rounded at random.
    """

    target: UpdateTarget
    matrix: Matrix
    rows: Tensor
    columns: Tensor
    factor: float
    dither_key: int


class LowRankNoise(ABC):
    """The operations of `LowRankLaw` on the tensors of one device. All backends give equal bits."""

    takes_blocks = False  # a and b are small, and drawn when a module runs

    def __init__(self, law: LowRankLaw) -> None:
        self.law = law

    def vectors(self, matrix: Matrix, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a and b of each direction, without the factor rank^-1/2.

        Args:
            matrix: of which the elements in `rows` and `columns` are asked for.
            keys: of the directions.

        Returns:
            a, fp32 [len(keys) * rank, len(rows)]; b, fp32 [len(keys) * rank, len(columns)].
        """
        first_row = matrix.rows.start
        a = self._entries(matrix, keys, first_row, matrix.num_rows, len(matrix.rows))
        first_column = FIRST_OF_COLUMNS + matrix.columns.start
        b = self._entries(matrix, keys, first_column, matrix.num_columns, len(matrix.columns))
        return a, b

    def update_(
        self,
        targets: Sequence[UpdateTarget],
        updates: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        """Apply the same updates to all targets: theta * factor - delta for each step, in order.

        Args:
            targets: on the backend's device, with the shape of the full parameter.
            updates: of one step or of many.
            precision: how 16-bit values are stored.
        """
        if not targets:
            return
        device = targets[0].values.device
        for step in _steps(updates):
            rank = self.law.rank
            of_directions = torch.tensor(
                [update.coefficient / math.sqrt(rank) for update in step], dtype=torch.float32
            )
            # Of each term. They go to the device once: a copy from the host waits for the GPU.
            coefficients = of_directions.repeat_interleave(rank)[:, None].to(device)
            keys = [update.key for update in step]
            for target in targets:
                matrix = Matrix.of(
                    target.parameter_id, target.shape, target.region, target.values.numel()
                )
                a, b = self.vectors(matrix, keys)
                u = a * coefficients
                subtraction = Subtraction(target, matrix, u, b, step[0].factor, keys[0])
                self._subtract(subtraction, precision)

    @abstractmethod
    def _entries(
        self, matrix: Matrix, keys: Sequence[int], first: int, distance: int, count: int
    ) -> Tensor:
        """Return entries [first + s * distance, ... + count) of each key, for s = 0 to rank - 1.

        Returns:
            fp32 [len(keys) * rank, count].
        """

    @abstractmethod
    def _subtract(self, subtraction: Subtraction, precision: UpdatePrecision) -> None:
        """Change the elements of a target in place, and round each of them once."""


def _steps(updates: Sequence[Update]) -> Iterator[list[Update]]:
    """Yield the updates of each step."""
    step: list[Update] = []
    for update in updates:
        if update.begins_step and step:
            yield step
            step = []
        step.append(update)
    if step:
        yield step
