"""Blocks that are perturbed more or less often, by given weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from lezo_ds.zo.layers.base import LayerPolicy, LayerSample
from lezo_ds.zo.layers.sampling import kept_probabilities, weighted_sample
from lezo_ds.zo.options import check_option
from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class Weighted(LayerPolicy):
    """Keeps each block with a probability proportional to its weight, up to 1.

    The update of a block that is kept with probability p is multiplied by (m / L) / p, with m of L blocks
    kept: rarely perturbed blocks take longer steps, and all learn equally fast on average.

    Source: importance sampling; see `weighted_sample`.

    Attributes:
        weights: a number above 0 for each block, from the first to the last, with commas between them. Empty
            gives all blocks the same weight.

    Raises:
        UserError: `weights` is not of this form.
    """

    weights: str = ""
    has_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option(
            "zo.layer_policy_options.weights",
            self.weights,
            self._numbers is not None,
            expected=f"{self.num_layers} numbers above 0, with commas between them",
            fix="leave it out for equal weights",
        )

    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the sample of the next step."""
        probabilities = kept_probabilities(self._numbers or (), self.num_kept)
        return weighted_sample(seed, len(records), probabilities)

    @cached_property
    def _numbers(self) -> tuple[float, ...] | None:
        """The weights; None if the option cannot be read."""
        if not self.weights.strip():
            return (1.0,) * self.num_layers
        try:
            numbers = tuple(map(float, self.weights.split(",")))
        except ValueError:
            return None
        valid = len(numbers) == self.num_layers and all(n > 0 and math.isfinite(n) for n in numbers)
        return numbers if valid else None
