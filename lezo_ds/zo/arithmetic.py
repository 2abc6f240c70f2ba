"""Sums and deviations with the same bits in every version of Python and on every machine."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence


def add_in_order(values: Sequence[float]) -> float:
    """Return the sum, rounded after every addition.

    The built-in `sum` compensates for rounding from Python 3.12 on, which gives other bits than before.
    """
    return functools.reduce(operator.add, values, 0.0)


def deviation(values: Sequence[float], degrees_of_freedom: int) -> float:
    """Return the standard deviation, with the same bits on every machine; NaN if a value is not finite.

    Args:
        values: at least one.
        degrees_of_freedom: the sum of squares is divided by it: the number of values for that of a
            population, one less for that of a sample.
    """
    if all(value == values[0] for value in values):  # their mean may be rounded to another value
        return 0.0 if math.isfinite(values[0]) else math.nan
    mean = add_in_order(values) / len(values)
    squares = [(value - mean) * (value - mean) for value in values]
    return math.sqrt(add_in_order(squares) / degrees_of_freedom)


def in_units_of(spread: float, values: Sequence[float]) -> tuple[float, ...]:
    """Return values / spread, or zeros if the spread is 0: values that are all the same say nothing."""
    return tuple(0.0 if spread == 0 else value / spread for value in values)
