"""What ZeRO-3 keeps gathered while a model runs: DeepSpeed's prefetcher (0.19.8), played through by sizes.

Before a module runs, DeepSpeed gathers its weights and those of the modules that follow, up to
stage3_prefetch_bucket_size at a time and stage3_max_live_parameters in all; each into its own place
(allgather_sequential). After a module has run it releases those that no later module reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from lezo_ds.tools.planning.model_facts import ModuleFacts, ParameterFacts


def gathered_elements(modules: Sequence[ModuleFacts], max_live: int, prefetch_bucket: int) -> list[int]:
    """Return how many elements are gathered while each module of a forward pass runs.

    Of a pass once DeepSpeed knows the modules' order.

    Args:
        modules: in the order they run.
        max_live: stage3_max_live_parameters; no prefetch starts beyond it.
        prefetch_bucket: stage3_prefetch_bucket_size; a prefetch ends with the parameter that reaches it.
    """
    queue = deque(parameter for module in modules for parameter in module.parameters)
    last_use = {p.key: index for index, module in enumerate(modules) for p in module.parameters}
    gathered: dict[int, int] = {}
    held = []
    for index, module in enumerate(modules):
        for parameter in module.parameters:
            gathered[parameter.key] = parameter.numel
            if queue and queue[0].key == parameter.key:
                queue.popleft()
        room = min(max_live - sum(gathered.values()), prefetch_bucket)
        gathered |= _prefetched(queue, gathered, room)
        held.append(sum(gathered.values()))
        gathered = {key: numel for key, numel in gathered.items() if last_use[key] > index}
    return held


def _prefetched(queue: deque[ParameterFacts], gathered: Mapping[int, int], room: int) -> dict[int, int]:
    """Take from the queue what one prefetch gathers."""
    wanted: dict[int, int] = {}
    while queue and sum(wanted.values()) < room:
        parameter = queue.popleft()
        if parameter.key not in gathered:
            wanted[parameter.key] = parameter.numel
    return wanted
