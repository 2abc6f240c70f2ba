"""Learning rate schedules: functions of the step and of the number of steps only.

Rank 0 computes the rate and broadcasts it with the plan, and the journal records it for replays.
Replicas take the rate of one of them. So a cosine that differs in its last bit between two machines
does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lezo_ds.registry import Registry


@dataclass(frozen=True)
class Schedule:
    """The shape of a schedule after the warm-up.

    Attributes:
        share: maps progress, 0 to 1, to the share of the learning rate that remains, 0 to 1.
        depends_on_length: whether `share` changes with progress. A resumption with another number
            of steps is then refused.
    """

    share: Callable[[float], float]
    depends_on_length: bool = True


SCHEDULES: Registry[Schedule] = Registry(
    "schedule of the learning rate", "zo.lr_schedule", kind=Schedule
)
SCHEDULES.add("constant", Schedule(lambda _: 1.0, depends_on_length=False))
SCHEDULES.add("linear", Schedule(lambda progress: 1 - progress))
SCHEDULES.add("cosine", Schedule(lambda progress: (1 + math.cos(math.pi * progress)) / 2))


@dataclass(frozen=True)
class LearningRates:
    """The learning rates of a run.

    Attributes:
        schedule: the shape of the curve after the warm-up.
        peak: the learning rate at the end of the warm-up.
        warmup_steps: number of steps over which the rate rises to `peak` in equal parts.
        num_steps: number of steps of the run, warm-up included. None if the schedule needs none.
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
        assert self.num_steps is not None, "make_schedule checks it"
        num_falling = max(1, self.num_steps - self.warmup_steps)
        progress = (step - self.warmup_steps) / num_falling
        share = float(self.schedule.share(min(progress, 1.0)))  # it may be NumPy's
        if not 0 <= share <= 1:
            raise ValueError(f"the share {share} of the learning rate is not from 0 to 1")
        return self.peak * share
