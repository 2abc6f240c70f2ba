"""What an update rule is: from the records of the steps so far to what changes theta."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lezo_ds.zo.keys import direction_key
from lezo_ds.zo.records import StepRecord


class Update(NamedTuple):
    """One update of a parameter: theta <- theta * factor - coefficient * z(key).

    Attributes:
        key: unsigned 64-bit key of the noise.
        coefficient: multiplies z; for MeZO the learning rate times the projected gradient.
        factor: multiplies theta; 1 - learning rate * weight decay for decoupled weight decay.
    """

    key: int
    coefficient: float
    factor: float = 1.0


@dataclass(frozen=True)
class Term:
    """A direction and how much of it a step subtracts.

    Attributes:
        record: the step that the direction belongs to; the blocks that it dropped are left alone.
        direction: index of the direction within that step.
        coefficient: of z.
    """

    record: StepRecord
    direction: int
    coefficient: float


@dataclass(frozen=True)
class StepUpdate:
    """What one step does to theta.

    Attributes:
        record: of the step.
        terms: in the order in which they are subtracted.
        factor: theta is multiplied with it first, except in the blocks that the step dropped and in the
            parameters that do not decay.
    """

    record: StepRecord
    terms: tuple[Term, ...]
    factor: float = 1.0


@dataclass(frozen=True)
class UpdateRule(ABC):
    """Says what each step does to theta. A pure function of its arguments."""

    @abstractmethod
    def step_update(self, records: Sequence[StepRecord], step: int) -> StepUpdate:
        """Return what an applied step does.

        Args:
            records: of the run from step 0, `step` included; later ones may follow.
            step: index of the step; its record is applied.
        """

    def step_updates(self, records: Sequence[StepRecord], start: int, stop: int) -> list[StepUpdate]:
        """Return what the applied steps among steps `start` to `stop` - 1 do, in order."""
        return [self.step_update(records, step) for step in range(start, stop) if records[step].applied]


def updates_of_parameter(updates: Iterable[StepUpdate], layer: int | None, *, decays: bool) -> list[Update]:
    """Return all changes of one parameter, in order.

    Args:
        updates: of steps.
        layer: index of the transformer block that holds the parameter; None outside the blocks.
        decays: whether the parameter is multiplied with the factor of a step.
    """
    found = []
    for update in updates:
        keeps = layer not in update.record.dropped_layers
        factor = update.factor if decays and keeps else 1.0
        changes = [
            Update(direction_key(term.record.key, term.direction), coefficient)
            for term in update.terms
            if (coefficient := _coefficient(term, layer)) != 0
        ]
        if factor != 1.0:
            # Of the first change, or of one that subtracts nothing.
            first, *rest = changes or [Update(update.record.key, 0.0)]
            changes = [first._replace(factor=factor), *rest]
        found += changes
    return found


def _coefficient(term: Term, layer: int | None) -> float:
    if layer in term.record.dropped_layers:
        return 0.0
    weights = term.record.layer_weights
    return term.coefficient if layer is None or not weights else term.coefficient * weights[layer]
