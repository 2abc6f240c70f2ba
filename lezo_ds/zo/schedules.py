"""Learning rate schedules: functions of the step and of the number of steps only.

Rank 0 computes the rate and broadcasts it with the plan, and the journal records it for replays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lezo_ds.registry import Registry


@dataclass(frozen=True)
class Schedule:
    """The shape of a schedule after the warm-up."""

    share: Callable[[float], float]
    """Maps progress, 0 to 1, to the share of the learning rate that remains, 0 to 1."""
    depends_on_length: bool = True
    """Whether `share` changes with progress. A resumption with another number of steps is then refused."""


SCHEDULES: Registry[Schedule] = Registry(
    "schedule of the learning rate", "zo.lr_schedule", kind=Schedule
)
SCHEDULES.add("constant", Schedule(lambda _: 1.0, depends_on_length=False))
SCHEDULES.add("linear", Schedule(lambda progress: 1 - progress))
SCHEDULES.add("cosine", Schedule(lambda progress: (1 + math.cos(math.pi * progress)) / 2))


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of a run of `num_steps` steps, warm-up included."""

    schedule: Schedule
    peak: float
    warmup_steps: int = 0
    num_steps: int | None = None

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        In a warm-up of w steps it is peak * (step + 1) / (w + 1), so that no step has the rate 0.
        """
        if step < self.warmup_steps:
            return self.peak * ((step + 1) / (self.warmup_steps + 1))
        if not self.schedule.depends_on_length:
            return self.peak
        assert self.num_steps is not None, "make_schedule checks it"
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.peak * self.schedule.share(min(progress, 1.0))
