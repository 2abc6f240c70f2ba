"""Gathers weights a block at a time, one block ahead of the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn


class Part(Protocol):
    """Weights that are gathered and released together.

    Attributes:
        numel: number of elements of the whole weights.
        is_shared: whether several modules use them. They then stay gathered until the pass ends, so that a
            pass gathers them once.
    """

    numel: int
    is_shared: bool

    def start(self) -> None:
        """Start to gather. A collective that does not wait."""

    def wait(self) -> None:
        """Wait until the weights that `start` has asked for can be used."""

    def release(self) -> None:
        """Free the whole weights."""


class GatherAhead:
    """Gathers the parts that a module needs before it runs, and those of the next module while it runs.

    The next module is the one that followed in the pass before. In the first pass, and where a pass differs
    from the one before, each module waits for its own weights. All ranks must run the same modules.

    Args:
        model: the root module, whose forward is a pass.
        parts_of: the parts of each module that needs weights. A module must not be inside another one that
            has the same part.
        max_numel: no part is gathered ahead if there would then be more elements than this.
    """

    def __init__(
        self, model: nn.Module, parts_of: Mapping[nn.Module, Sequence[Part]], *, max_numel: float
    ) -> None:
        self._max_numel = max_numel
        self._numel = 0
        self._started: list[Part] = []
        self._gathered: list[Part] = []
        self._expected: list[Sequence[Part]] = []
        self._ran: list[Sequence[Part]] = []
        model.register_forward_pre_hook(self._begin)
        for module, parts in parts_of.items():
            self._hook(module, parts)
        model.register_forward_hook(self._end)

    def _hook(self, module: nn.Module, parts: Sequence[Part]) -> None:
        # These look the methods up at each call, because the benchmark wraps them.
        def before(*_: object) -> None:
            self.gather(parts)

        def after(*_: object) -> None:
            self.release(parts)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def gather(self, parts: Sequence[Part]) -> None:
        """Make parts available, and start to gather those that are expected next."""
        for part in parts:
            if part not in self._gathered:
                if part not in self._started:
                    self._start(part)
                self._wait(part)
        place = len(self._ran)
        self._ran.append(parts)
        if self._expected[place : place + 1] == [parts]:
            for part in self._expected[place + 1] if place + 1 < len(self._expected) else ():
                is_here = part in self._gathered or part in self._started
                if not is_here and self._numel + part.numel <= self._max_numel:
                    self._start(part)

    def release(self, parts: Sequence[Part]) -> None:
        """Free the parts that no other module uses."""
        for part in parts:
            if not part.is_shared:
                self._release(part)

    def _start(self, part: Part) -> None:
        part.start()
        self._numel += part.numel
        self._started.append(part)

    def _wait(self, part: Part) -> None:
        part.wait()
        self._started.remove(part)
        self._gathered.append(part)

    def _release(self, part: Part) -> None:
        part.release()
        self._gathered.remove(part)
        self._numel -= part.numel

    def _begin(self, *_: object) -> None:
        self._release_all()  # an error may have ended the pass before
        self._expected, self._ran = self._ran, []

    def _end(self, *_: object) -> None:
        self._release_all()

    def _release_all(self) -> None:
        for part in list(self._started):
            self._wait(part)
        for part in list(self._gathered):
            self._release(part)
