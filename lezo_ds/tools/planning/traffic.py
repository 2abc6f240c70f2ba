"""The weights that one rank receives in a zeroth-order step."""

from __future__ import annotations

from dataclasses import dataclass

from lezo_ds.config import RunConfig, num_passes
from lezo_ds.tools.planning.memory import RankMemory
from lezo_ds.tools.planning.model_sizes import ModelSizes


@dataclass(frozen=True)
class StepTraffic:
    """Bytes of weights that one rank receives in a step.

    Attributes:
        gathered: from other ranks.
        from_host: from its host's memory.
    """

    gathered: float
    from_host: float


def step_traffic(config: RunConfig, model: ModelSizes, memory: RankMemory, world_size: int) -> StepTraffic:
    """Return the traffic of one rank in a zeroth-order step.

    A forward pass gathers (R - 1) / R of the weights if R ranks share them.

    Args:
        config: configuration of the run.
        model: sizes of its model, with its adapter.
        memory: the rank's memory, which tells whether its shards are on the host.
        world_size: number of ranks.
    """
    num_forwards = num_passes(config) / world_size  # each gathers a weight once for all of its probes
    num_shards = config.partition_size or world_size
    weights = num_forwards * model.num_parameters * model.itemsize
    return StepTraffic(
        gathered=weights * (num_shards - 1) / num_shards,
        from_host=weights / num_shards if memory.host else 0.0,
    )
