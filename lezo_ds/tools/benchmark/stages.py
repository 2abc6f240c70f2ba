"""Where the time of a step goes: a clock of nested stages, on the host and, for GPUs, by events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

STAGES = ("forward", "perturb", "update", "gather", "other")
"""forward: the model's own work; perturb: noise, and perturbed weights; update: of the stored weights;
gather: fetching and releasing a module's weights, DeepSpeed's own host time included; other."""


@dataclass(frozen=True)
class Moment:
    """A point in time.

    Attributes:
        host: seconds on the host's clock.
        event: on the GPU's current stream; None on a CPU.
    """

    host: float
    event: Any

    def seconds_until(self, end: Moment) -> float:
        """Return the time between two moments, the GPU's where there is one."""
        if self.event is None:
            return end.host - self.host
        return float(self.event.elapsed_time(end.event)) / 1000


@dataclass
class Span:
    """One passage through a stage; `outer` is the index of the span it lies in, if in any."""

    stage: str
    start: Moment
    outer: int | None
    end: Moment | None = None


class StageClock:
    """Adds up the time of each stage; time spent in an inner stage is not counted in the outer one.

    Args:
        device: on a GPU stages are timed by events on its current stream too, else by the host's clock only.

    Attributes:
        running: while false, nothing is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self.running = False
        self._device = device
        self._spans: list[Span] = []
        self._open: list[int] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time until the end of the block as `name`, one of STAGES."""
        if not self.running:
            yield
            return
        span = Span(name, self._now(), self._open[-1] if self._open else None)
        self._open.append(len(self._spans))
        self._spans.append(span)
        try:
            yield
        finally:
            self._open.pop()
            span.end = self._now()

    @contextmanager
    def methods(self, owner: Any, names: Sequence[str], stage: str) -> Iterator[None]:  # noqa: ANN401
        """Count the time in methods of an object, or of all objects of a class, as `stage` meanwhile."""
        before = {name: vars(owner).get(name) for name in names}
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name), stage))
        try:
            yield
        finally:
            for name, original in before.items():
                delattr(owner, name)
                if original is not None:
                    setattr(owner, name, original)

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds in each of STAGES since the last call: of the device, and of the host."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        device, host = dict.fromkeys(STAGES, 0.0), dict.fromkeys(STAGES, 0.0)
        for span in self._spans:
            assert span.end is not None, "a stage that is still open"
            for sums, elapsed in (
                (device, span.start.seconds_until(span.end)),
                (host, span.end.host - span.start.host),
            ):
                sums[span.stage] += elapsed
                if span.outer is not None:
                    sums[self._spans[span.outer].stage] -= elapsed
        self._spans.clear()
        return device, host

    def _timed(self, method: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with self.stage(stage):
                return method(*args, **kwargs)

        return timed

    def _now(self) -> Moment:
        if self._device.type != "cuda":
            return Moment(time.perf_counter(), None)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return Moment(time.perf_counter(), event)
