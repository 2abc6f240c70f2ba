"""How the learning rate changes over a run: a function of the step and of the number of steps only.

Rank 0 computes it and broadcasts it with the plan, and the journal records it. A replay therefore reads it,
and computes no schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lezo_ds.registry import Registry


@dataclass(frozen=True)
class Schedule:
    """The shape of a schedule.

    Attributes:
        share: maps progress to the share of the learning rate that remains, both from 0 to 1. Progress counts
            the steps after the warm-up: 0 at the first of them, 1 after the last.
        depends_on_length: whether `share` changes with progress. If it does, a run that is resumed with
            another number of steps would be a different run, so it is refused.
    """

    share: Callable[[float], float]
    depends_on_length: bool = True


SCHEDULES: Registry[Schedule] = Registry("schedule of the learning rate", "zo.lr_schedule")
SCHEDULES.add("constant", Schedule(lambda _: 1.0, depends_on_length=False))
SCHEDULES.add("linear", Schedule(lambda progress: 1 - progress))
SCHEDULES.add("cosine", Schedule(lambda progress: (1 + math.cos(math.pi * progress)) / 2))


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of a run.

    Attributes:
        schedule: their shape after the warm-up.
        peak: the learning rate at the end of the warm-up.
        warmup_steps: number of steps of the warm-up.
        num_steps: number of steps of the run, warm-up included. None if the schedule does not depend on it.
    """

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
        assert self.num_steps is not None, "a schedule that depends on the length of the run is given it"
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.peak * self.schedule.share(min(progress, 1.0))
