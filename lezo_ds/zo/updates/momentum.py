"""Stochastic gradient descent with momentum, whose only state is the journal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lezo_ds.zo.options import check_option
from lezo_ds.zo.records import StepRecord
from lezo_ds.zo.updates.base import StepUpdate, Term, UpdateRule


@dataclass(frozen=True)
class SgdMomentum(UpdateRule):
    """theta <- theta - eta / n * (sum over j = 0 .. window - 1 of momentum^j * g_{t-j} * z_{t-j}).

    Source: heavy-ball momentum (Polyak 1964) as in PyTorch's SGD without dampening, cut off after `window`
    steps. j counts applied steps back from step t. eta and n are those of step t and of step t - j. The
    directions of earlier steps are drawn again, so that nothing but their records is stored. A block that a
    step dropped gets nothing from that step, and goes on with the directions of the others.

    Its cost: an update draws and applies window * n directions where `sgd` has n. In 16-bit weights each of
    them is stored, and therefore rounded, on its own. Stochastic rounding uses the same dither words whenever
    it applies a direction: it stays unbiased, but its errors average out less.

    With momentum m, a constant gradient moves theta by (1 - m^window) / (1 - m) times as much as `sgd` does:
    lower the learning rate by about this factor.

    Attributes:
        momentum: from 0 (which is `sgd`) to 1, 1 excluded.
        window: number of steps whose directions are applied, at least 1.

    Raises:
        UserError: an option is out of range.
    """

    momentum: float = 0.9
    window: int = 10

    def __post_init__(self) -> None:
        options = "zo.update_rule_options."
        check_option(
            options + "momentum",
            self.momentum,
            0 <= self.momentum < 1,
            expected="0 to 1, 1 excluded",
            fix=f"set {options}momentum=0.9",
        )
        check_option(
            options + "window",
            self.window,
            self.window >= 1,
            expected="at least 1",
            fix=f"set {options}window=10",
        )

    def step_update(self, records: Sequence[StepRecord], step: int) -> StepUpdate:
        """Return the update of an applied step: its own directions first, then those of the step before."""
        record = records[step]
        applied = (records[index] for index in range(step, -1, -1) if records[index].applied)
        terms = []
        factor = 1.0
        for earlier in itertools.islice(applied, self.window):
            share = factor * (record.learning_rate / len(earlier.projected_grads))
            terms += [
                Term(earlier, direction, share * gradient)
                for direction, gradient in enumerate(earlier.projected_grads)
            ]
            factor *= self.momentum
        return StepUpdate(record, tuple(terms))
