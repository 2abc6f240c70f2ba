"""What ZeRO-3 keeps gathered while a model runs: DeepSpeed's prefetcher (0.19.8), played through by sizes.

Before a module runs, DeepSpeed gathers its weights and those of the modules that follow, up to
stage3_prefetch_bucket_size at a time and stage3_max_live_parameters in all. Several parameters that are
gathered at once arrive in one buffer, are copied out of it when the first of them is waited for, and the
buffer stays until the last of them has been. Weights that one rank holds
alone, in its host's memory, come without a buffer. On CPUs each of gloo's two threads needs a second buffer
for what it gathers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lezo_ds.planning.model_facts import ModuleFacts, ParameterFacts

_GLOO_THREADS = 2


@dataclass(frozen=True)
class GatheredElements:
    """Elements of gathered weights that a rank holds at one module, in buffers and copies.

    Attributes:
        arriving: when the module's own have been copied out of their buffer.
        running: while the module runs.
    """

    arriving: int
    running: int


def gathered_elements(
    modules: Sequence[ModuleFacts], max_live: int, prefetch_bucket: int, *, by_gloo: bool, has_buffers: bool
) -> list[GatheredElements]:
    """Return what is gathered at each module of a forward pass, once DeepSpeed knows their order.

    Args:
        modules: in the order they run.
        max_live: stage3_max_live_parameters; no prefetch starts beyond it.
        prefetch_bucket: stage3_prefetch_bucket_size; a prefetch ends with the parameter that reaches it.
        by_gloo: the ranks compute on CPUs.
        has_buffers: weights come from several ranks.
    """
    gathering = _Gathering(modules, max_live, prefetch_bucket, by_gloo, has_buffers)
    return [gathering.run(index, module) for index, module in enumerate(modules)]


@dataclass
class _Bundle:
    """Parameters that are gathered at once."""

    numel: int
    has_buffer: bool
    waiting: set[int] = field(default_factory=set)
    copied: bool = False


class _Gathering:
    def __init__(
        self,
        modules: Sequence[ModuleFacts],
        max_live: int,
        prefetch_bucket: int,
        by_gloo: bool,
        has_buffers: bool,
    ) -> None:
        self._queue = deque(p for module in modules for p in module.parameters)
        self._last_use = {p.key: i for i, module in enumerate(modules) for p in module.parameters}
        self._max_live = max_live
        self._prefetch_bucket = prefetch_bucket
        self._by_gloo = by_gloo
        self._has_buffers = has_buffers
        self._live = 0
        self._held = 0  # elements in memory: buffers, and what has been copied out of them
        self._bundles: dict[int, _Bundle] = {}  # of each parameter that is gathered

    def run(self, index: int, module: ModuleFacts) -> GatheredElements:
        own = module.parameters
        self._gather([parameter for parameter in own if parameter.key not in self._bundles])
        arriving = max([self._in_memory(), *(self._wait(parameter) for parameter in own)])
        for parameter in own:
            if self._queue and self._queue[0].key == parameter.key:
                self._queue.popleft()
        self._prefetch()
        running = self._in_memory()
        for parameter in own:
            if self._last_use[parameter.key] == index:
                del self._bundles[parameter.key]
                self._live -= parameter.numel
                self._held -= parameter.numel
        return GatheredElements(arriving, running)

    def _gather(self, parameters: Sequence[ParameterFacts]) -> None:
        numel = sum(parameter.numel for parameter in parameters)
        has_buffer = self._has_buffers and len(parameters) > 1
        bundle = _Bundle(numel, has_buffer, waiting={parameter.key for parameter in parameters})
        self._bundles.update(dict.fromkeys(bundle.waiting, bundle))
        self._live += numel
        self._held += numel

    def _wait(self, parameter: ParameterFacts) -> int:
        """Wait for a parameter; return what is in memory before its buffer goes."""
        bundle = self._bundles[parameter.key]
        if not bundle.copied:
            bundle.copied = True
            self._held += bundle.numel * bundle.has_buffer
        in_memory = self._in_memory()
        if parameter.key in bundle.waiting:
            bundle.waiting.remove(parameter.key)
            if not bundle.waiting:
                self._held -= bundle.numel * bundle.has_buffer
        return in_memory

    def _in_memory(self) -> int:
        if not self._by_gloo:
            return self._held
        coming = {id(bundle): bundle.numel for bundle in self._bundles.values() if not bundle.copied}
        return self._held + sum(sorted(coming.values())[-_GLOO_THREADS:])

    def _prefetch(self) -> None:
        room = min(self._max_live - self._live, self._prefetch_bucket)
        wanted: dict[int, ParameterFacts] = {}
        num_wanted = 0
        while self._queue and num_wanted < room:
            parameter = self._queue.popleft()
            if parameter.key not in self._bundles and parameter.key not in wanted:
                wanted[parameter.key] = parameter
                num_wanted += parameter.numel
        self._gather(list(wanted.values()))
