"""Stochastic gradient descent along the directions of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lezo_ds.zo.records import StepRecord
from lezo_ds.zo.updates.base import StepUpdate, Term, UpdateRule


@dataclass(frozen=True)
class Sgd(UpdateRule):
    """theta <- theta - eta / n * g_d * z_d for each of n directions in turn (LeZO, Algorithm 1, line 8)."""

    def step_update(self, records: Sequence[StepRecord], step: int) -> StepUpdate:
        """Return the update of an applied step."""
        record = records[step]
        share = record.learning_rate / len(record.projected_grads)
        terms = [
            Term(record, direction, share * gradient)
            for direction, gradient in enumerate(record.projected_grads)
        ]
        return StepUpdate(record, tuple(terms))
