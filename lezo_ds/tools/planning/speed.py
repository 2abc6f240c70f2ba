"""An estimate of a step's time and traffic, from a few speeds of the hardware.

Per rank and step, with P ranks that share the weights, k forward passes a rank and b bytes a weight:
matrix products, 2 operations a weight and token, both signs; reading theta and writing theta + mu z and
theta - mu z of the active weights, 3 b bytes each, k times; gathering k (P - 1) / P of the model; and
updating the active weights of the shards, 2 b bytes each, and 4 more where low bits are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from lezo_ds.tools.planning.memory import LOW_BITS_BYTES, Memory
from lezo_ds.tools.planning.model_facts import ModelFacts


@dataclass(frozen=True)
class Speeds:
    """What a rank's hardware reaches.

    Attributes:
        operations: of matrix products in the weights' dtype, a second.
        memory_bytes: read and written together on the device, a second.
        link_bytes: a rank receives from the ranks it shares weights with, a second.
        host_bytes: from the host's memory to the device, a second.
    """

    operations: float
    memory_bytes: float
    link_bytes: float
    host_bytes: float


@dataclass(frozen=True)
class StepWork:
    """What a rank does in a step.

    Attributes:
        operations: of matrix products.
        perturb_bytes: read and written to perturb weights.
        update_bytes: read and written to update shards.
        gathered_bytes: of weights received from other ranks.
        host_bytes: of shards that come from the host's memory.
    """

    operations: float
    perturb_bytes: float
    update_bytes: float
    gathered_bytes: float
    host_bytes: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step's stages.

    Attributes:
        forward: matrix products.
        perturb: making perturbed weights.
        update: of the shards.
        gather: receiving weights, from other ranks or from the host.
    """

    forward: float
    perturb: float
    update: float
    gather: float

    @property
    def shortest(self) -> float:
        """If all that is gathered arrives while something else is computed."""
        return max(self.forward + self.perturb, self.gather) + self.update

    @property
    def longest(self) -> float:
        """If nothing overlaps."""
        return self.forward + self.perturb + self.gather + self.update


def step_work(
    model: ModelFacts,
    *,
    tokens: int,
    length: int,
    num_passes: int,
    kept: float,
    partition_size: int,
    memory: Memory,
) -> StepWork:
    """Return what a rank does in a zeroth-order step.

    Args:
        model: with its adapter.
        tokens: of this rank's examples in a step, one sign.
        length: of an input, in tokens.
        num_passes: forward passes of this rank in a step.
        kept: share of the blocks that a step perturbs and updates.
        partition_size: ranks that share the weights.
        memory: of the rank; says what its shards hold, and where.
    """
    per_token = 2 * model.num_in_blocks + 2 * length * model.hidden_size * model.num_blocks
    outside = model.num_trained - model.num_trained_in_blocks
    active = kept * model.num_trained_in_blocks + outside
    tables = sum(module.numel for module in model.modules if module.kind == "embedding")
    perturbed = max(0.0, active - tables)  # of a table only the rows that are read are made
    low_bits = 2 * LOW_BITS_BYTES if memory.low_bits or memory.host_low_bits else 0
    whole = model.num_parameters * model.itemsize
    return StepWork(
        operations=2 * tokens * per_token,
        perturb_bytes=num_passes * perturbed * 3 * model.itemsize,
        update_bytes=active / partition_size * (2 * model.itemsize + low_bits),
        gathered_bytes=num_passes * whole * (partition_size - 1) / partition_size,
        host_bytes=num_passes * whole / partition_size if memory.host else 0.0,
    )


def step_time(work: StepWork, speeds: Speeds) -> StepTime:
    """Return the time of a step's stages; offloaded shards are updated at the speed they travel."""
    update_speed = speeds.host_bytes if work.host_bytes else speeds.memory_bytes
    return StepTime(
        forward=work.operations / speeds.operations,
        perturb=work.perturb_bytes / speeds.memory_bytes,
        update=work.update_bytes / update_speed,
        gather=work.gathered_bytes / speeds.link_bytes + work.host_bytes / speeds.host_bytes,
    )
