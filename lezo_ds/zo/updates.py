"""From step records to what is subtracted from each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lezo_ds.zo.keys import direction_key
from lezo_ds.zo.records import StepRecord

UpdatePrecision = Literal["stochastic", "fp32_master"]
"""How an update is stored in 16-bit weights: rounded at random without bias, or with 16 low bits in addition.

Rounding to nearest is no choice: most updates are far below half a unit in the last place of a 16-bit weight,
and would be lost. Weights in fp32 are rounded to nearest under either value."""


class Update(NamedTuple):
    """One update of a parameter: theta <- theta * factor - coefficient * z(key)."""

    key: int
    coefficient: float
    factor: float = 1.0


@dataclass(frozen=True)
class StepUpdate:
    """theta <- factor * theta - eta / n * g_d * z_d for each of n directions (LeZO, Algorithm 1, line 8)."""

    record: StepRecord
    factor: float
    """1 - eta * weight decay: decoupled decay (Loshchilov and Hutter 2019) of matrices, except in blocks
    that the step dropped, as MeZO's flag --weight_decay."""


def step_updates(
    records: Sequence[StepRecord], start: int, stop: int, weight_decay: float = 0.0
) -> list[StepUpdate]:
    """Return the updates of the applied steps among steps `start` to `stop` - 1, in order."""
    return [
        StepUpdate(record, 1 - record.learning_rate * weight_decay)
        for record in records[start:stop]
        if record.applied
    ]


def updates_of_parameter(
    updates: Iterable[StepUpdate], block: int, *, decays: bool
) -> list[Update]:
    """Return all updates, in order, of a parameter of a transformer block or of a group outside them."""
    result = []
    for update in updates:
        record = update.record
        if block in record.dropped_layers:
            continue
        share = record.learning_rate / len(record.projected_grads)
        weight = record.layer_weights[block] if record.layer_weights else 1.0
        changes = [
            Update(direction_key(record.key, direction), share * gradient * weight)
            for direction, gradient in enumerate(record.projected_grads)
        ]
        changes = [change for change in changes if change.coefficient != 0]
        if decays and update.factor != 1.0:
            # The decay is part of the first change, or of one that subtracts nothing.
            first, *rest = changes or [Update(record.key, 0.0)]
            changes = [first._replace(factor=update.factor), *rest]
        result += changes
    return result
