"""The work of one zeroth-order step on one rank, and an estimate of its time from the hardware's speeds."""

from __future__ import annotations

from dataclasses import dataclass

from lezo_ds.config import RunConfig, copies_per_pass, num_dropped, num_passes
from lezo_ds.tools.planning.memory import LOW_BITS_BYTES, RankMemory, keeps_low_bits
from lezo_ds.tools.planning.model_sizes import ModelSizes


@dataclass(frozen=True)
class Speeds:
    """Speeds that a rank's hardware reaches.

    Attributes:
        operations: floating-point operations per second of matrix products in the weights' dtype.
        memory: bytes per second read and written together on the device.
        link: bytes per second that a rank receives from the ranks it shares weights with.
        host: bytes per second from the host's memory to the device.
        source: where the numbers come from, in words.
    """

    operations: float
    memory: float
    link: float
    host: float
    source: str = ""


@dataclass(frozen=True)
class StepWork:
    """What one rank does in a step.

    Attributes:
        operations: floating-point operations of matrix products.
        perturb_bytes: bytes read and written to make perturbed copies.
        update_bytes: bytes read and written to update the shards.
        gathered_bytes: bytes of weights received from other ranks.
        host_bytes: bytes of shards received from the host's memory.
    """

    operations: float
    perturb_bytes: float
    update_bytes: float
    gathered_bytes: float
    host_bytes: float

    def seconds(self, speeds: Speeds) -> dict[str, float]:
        """Return the time of each stage. Offloaded shards are updated at the speed at which they travel."""
        return {
            "forward": self.operations / speeds.operations,
            "perturb": self.perturb_bytes / speeds.memory,
            "gather": self.gathered_bytes / speeds.link + self.host_bytes / speeds.host,
            "update": self.update_bytes / (speeds.host if self.host_bytes else speeds.memory),
        }

    def step_seconds(self, speeds: Speeds) -> tuple[float, float]:
        """Return the time of a step if its gathers are hidden behind the computation, and if they are not."""
        stages = self.seconds(speeds)
        computing = stages["forward"] + stages["perturb"]
        return max(computing, stages["gather"]) + stages["update"], sum(stages.values())


def step_work(
    config: RunConfig, model: ModelSizes, memory: RankMemory, *, length: int, world_size: int
) -> StepWork:
    """Return the work of one rank in a zeroth-order step.

    A pass gathers (R - 1) / R of the weights if R ranks share them. It reads each active weight and writes
    its perturbed copies. The update reads and writes the rank's shards of the active weights.

    Args:
        config: configuration of the run.
        model: sizes of its model, with its adapter.
        memory: the rank's memory, which tells whether its shards are on the host.
        length: tokens of an input.
        world_size: number of ranks.
    """
    rank_passes, copies = num_passes(config) / world_size, copies_per_pass(config)
    forwards = rank_passes * 2 / copies  # both signs are run, together or one after the other
    tokens = 2 * rank_passes * config.train.micro_batch_size * length
    per_token = 2 * model.num_in_blocks + 2 * length * model.hidden_size * model.num_blocks
    dropped = num_dropped(config.zo, model.num_blocks) / model.num_blocks
    active = model.num_trained - dropped * model.num_trained_in_blocks
    num_shards = config.partition_size or world_size
    weights = model.num_parameters * model.itemsize
    low_bits = LOW_BITS_BYTES if keeps_low_bits(config, model) else 0
    return StepWork(
        operations=tokens * per_token,
        perturb_bytes=forwards * (active - model.num_trained_in_tables) * (1 + copies) * model.itemsize,
        update_bytes=active / num_shards * 2 * (model.itemsize + low_bits),
        gathered_bytes=forwards * weights * (num_shards - 1) / num_shards,
        host_bytes=forwards * weights / num_shards if memory.host else 0.0,
    )
