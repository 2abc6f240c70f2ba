"""From step records to what is subtracted from each parameter.

    StepRecord --step_updates--> StepUpdate --updates_of_parameter--> Update, Update, ...
    (the journal)                (+ decay)                            (of one parameter)

A step is applied as soon as its record is written, and a replay applies many records in one call.
Both take this path, so both give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lezo_ds.zo.keys import direction_keys
from lezo_ds.zo.records import StepRecord

UpdatePrecision = Literal["stochastic", "fp32_master"]
"""How an update is stored in 16-bit weights: rounded at random without bias, or with 16 more bits.

Rounding to nearest is no choice: most updates are far below half a unit in the last place of a
16-bit weight, and would be lost. fp32 weights store fp32 values as they are under either value."""


class Update(NamedTuple):
    """One update of a parameter: theta <- theta * factor - coefficient * z(key).

    Attributes:
        key: key of the direction, 0 to 2**64 - 1.
        coefficient: rounded to fp32 by the kernels.
        factor: below 1 for weight decay; rounded to fp32, too.
        begins_step: whether it is the first of a step. Directions of low rank are added up over a
            step before the weights are rounded.
    """

    key: int
    coefficient: float
    factor: float = 1.0
    begins_step: bool = True


@dataclass(frozen=True)
class StepUpdate:
    """One step: theta <- factor * theta - eta / n * g_d * z_d for each of n directions d.

    Source: LeZO, Algorithm 1, line 8.

    Attributes:
        record: has eta, the projected gradients g_d, and the key of the directions z_d.
        factor: 1 - eta * weight decay, the decoupled decay (Loshchilov and Hutter 2019) of
            matrices, except in blocks that the step dropped, as MeZO's flag --weight_decay.
        keys: of the directions. All blocks share them, since to hash one takes a microsecond.
    """

    record: StepRecord
    factor: float
    keys: tuple[int, ...]

    @functools.cached_property
    def unweighted(self) -> list[Update]:
        """The updates of a parameter without decay, if blocks have no weights."""
        return _changes(self, 1.0)


def step_updates(
    records: Sequence[StepRecord], start: int, stop: int, weight_decay: float = 0.0
) -> list[StepUpdate]:
    """Return the updates of the applied steps among steps `start` to `stop` - 1, in order."""
    return [
        StepUpdate(
            record,
            factor=1 - record.learning_rate * weight_decay,
            keys=direction_keys(record.key, len(record.projected_grads)),
        )
        for record in records[start:stop]
        if record.applied
    ]


def updates_of_parameter(
    updates: Iterable[StepUpdate], block: int, *, decays: bool
) -> list[Update]:
    """Return all updates of one parameter, in order.

    Args:
        updates: the updates of steps, in order.
        block: index of the parameter's transformer block, or of its group outside the blocks.
        decays: whether the parameter has weight decay: matrices do, vectors do not.
    """
    result: list[Update] = []
    for update in updates:
        if block not in update.record.dropped_layers:
            result += _updates_of_step(update, block, decays=decays)
    return result


def _updates_of_step(update: StepUpdate, block: int, *, decays: bool) -> list[Update]:
    weights = update.record.layer_weights
    changes = _changes(update, weights[block]) if weights else update.unweighted
    if decays and update.factor != 1.0:
        # The decay alone is an update that subtracts nothing.
        first = changes[0] if changes else Update(update.record.key, 0.0)
        # Only the first: the kernels multiply by the factor of every update.
        changes = [first._replace(factor=update.factor), *changes[1:]]
    return changes


def _changes(update: StepUpdate, weight: float) -> list[Update]:
    record = update.record
    rate = record.learning_rate / len(record.projected_grads)
    changes: list[Update] = []
    for direction, gradient in enumerate(record.projected_grads):
        coefficient = rate * gradient * weight
        if coefficient != 0:
            key = update.keys[direction]
            changes.append(Update(key, coefficient, begins_step=not changes))
    return changes
