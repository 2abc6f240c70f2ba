"""Stochastic gradient descent with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lezo_ds.zo.records import StepRecord
from lezo_ds.zo.updates.base import StepUpdate
from lezo_ds.zo.updates.sgd import Sgd


@dataclass(frozen=True)
class SgdWeightDecay(Sgd):
    """theta <- (1 - eta * weight_decay) * theta - eta * g * z, with weight decay on matrices only.

    Source: Loshchilov and Hutter 2019; MeZO's flag --weight_decay (Malladi et al. 2023), which leaves out
    biases and norms too. Blocks that the step dropped do not decay.

    Attributes:
        weight_decay: coefficient, at least 0.
    """

    weight_decay: float

    def step_update(self, records: Sequence[StepRecord], step: int) -> StepUpdate:
        """Return the update of an applied step."""
        factor = 1 - records[step].learning_rate * self.weight_decay
        return replace(super().step_update(records, step), factor=factor)
