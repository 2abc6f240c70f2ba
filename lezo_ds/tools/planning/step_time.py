"""The time of a zeroth-order step as an estimate, with everything that it assumes.

Gathers, the GPU and the host work at the same time, so the longest of them decides:

    gathers    weights received / speed of the slowest link that the ranks of a shard group span
    GPU        for each pass, the longer of 2 x parameters x tokens / products a second and of reading all
               weights once; and the instructions of the noise and the update
    host       Python, for each block of each pass

The journal's sync overlaps with the next step. It costs nothing unless the step is shorter than the sync.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lezo_ds.config import RunConfig, copies_per_pass, find_task, num_dropped, num_passes
from lezo_ds.tools.planning.hardware import DEFAULT_NODE_LINK, Cluster, Gpu
from lezo_ds.tools.planning.inputs import InputSizes
from lezo_ds.tools.planning.memory import keeps_low_bits
from lezo_ds.tools.planning.model_sizes import ModelSizes
from lezo_ds.tools.planning.traffic import StepTraffic
from lezo_ds.tools.workloads import typical_workload

HOST_MS_WHOLE, HOST_MS_SHARDED = 0.44, 0.60
"""Milliseconds of Python for a block in a pass, if this rank has the whole weights and if it gathers them.
`lezo-ds benchmark --host` measured them on one core of a CPU, with 40 blocks of width 16 and sparsity 0.75.
Other cores differ."""

_PRODUCTS, _READING, _INSTRUCTIONS = 0.4, 0.8, 0.75
"""Assumed shares of the figures of a data sheet that a GPU reaches."""

_PAIR, _UPDATE, _UPDATE_LOW_BITS = 52, 53, 67
"""Instructions of an element: of a pair of perturbed weights, and of an update without and with low bits
(counted in the code that Triton makes for H100s)."""

_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True)
class StepTime:
    """An estimate of the seconds of a step.

    Attributes:
        parts: seconds by the names above. They overlap.
        assumptions: what the estimate rests on that nobody gave or measured, in words.
    """

    parts: Mapping[str, float]
    assumptions: tuple[str, ...]

    @property
    def total(self) -> float:
        """Seconds of the step: those of its longest part."""
        return max(self.parts.values())

    @property
    def longest(self) -> str:
        """Name of the longest part."""
        return max(self.parts, key=lambda name: self.parts[name])


def step_time(
    config: RunConfig,
    model: ModelSizes,
    inputs: InputSizes,
    traffic: StepTraffic,
    *,
    cluster: Cluster,
    num_gpus: int,
) -> StepTime | None:
    """Estimate the time of a step.

    Args:
        config: configuration of the run.
        model: sizes of its model.
        inputs: sizes of its longest inputs.
        traffic: what a rank receives in a step.
        cluster: where the GPUs are.
        num_gpus: number of GPUs, with one rank on each.

    Returns:
        None if the kind of GPU is not known, or if the model writes answers in training, whose length nobody
        knows.
    """
    if cluster.gpu is None or inputs.trains_on_answers:
        return None
    parts = {
        "gathers": _gathers(config, traffic, cluster, num_gpus),
        "GPU": _gpu(config, model, cluster.gpu, num_gpus),
        "host": _host(config, model, num_gpus),
    }
    needed = {name: part for name, part in parts.items() if part.seconds}
    return StepTime(
        parts={name: part.seconds for name, part in needed.items()},
        assumptions=tuple(text for part in needed.values() for text in part.assumptions),
    )


def spans_nodes(config: RunConfig, cluster: Cluster, num_gpus: int) -> bool:
    """Return whether ranks of different nodes share one copy of the weights."""
    return cluster.node_size(num_gpus) % (config.partition_size or num_gpus) != 0


class _Part(NamedTuple):
    seconds: float
    assumptions: tuple[str, ...]


def _gathers(config: RunConfig, traffic: StepTraffic, cluster: Cluster, num_gpus: int) -> _Part:
    assert cluster.gpu is not None
    if spans_nodes(config, cluster, num_gpus):
        given, default, name = cluster.node_link, DEFAULT_NODE_LINK, "between nodes (--node-link)"
    else:
        given, default, name = cluster.link, cluster.gpu.link, "inside a node (--link)"
    host_link, node_size = cluster.gpu.host_link, cluster.node_size(num_gpus)
    seconds = traffic.gathered / _GIGA / (given or default) + traffic.from_host / _GIGA / host_link
    assumptions = []
    if traffic.gathered and given is None:
        assumptions.append(f"{default:g} GB/s {name}")
    if traffic.gathered and cluster.gpus_per_node is None and node_size < num_gpus:
        assumptions.append(f"{node_size} GPUs on a node (--gpus-per-node)")
    if traffic.from_host:
        assumptions.append(f"{host_link:g} GB/s from a host")
    return _Part(seconds, tuple(assumptions))


def _gpu(config: RunConfig, model: ModelSizes, gpu: Gpu, num_gpus: int) -> _Part:
    num_forwards = num_passes(config) / num_gpus
    copies, length = copies_per_pass(config), typical_workload(find_task(config.data)).length
    tokens = copies * config.train.micro_batch_size * length
    products = 2 * model.num_parameters * tokens / (_PRODUCTS * gpu.teraflops * _TERA)
    reading = model.num_parameters * model.itemsize / (_READING * gpu.bandwidth * _GIGA)
    share = 1 - num_dropped(config.zo, model.num_blocks) / model.num_blocks
    trained = model.num_trained - model.blocks_trained + share * model.blocks_trained
    update = _UPDATE_LOW_BITS if keeps_low_bits(config, model) else _UPDATE
    perturbing = num_forwards * _PAIR * copies / 2
    updating = update * config.zo.directions / (config.partition_size or num_gpus)
    noise = trained * (perturbing + updating) / (_INSTRUCTIONS * gpu.teraops * _TERA)
    assumptions = (
        f"inputs of {length} tokens",
        f"{_PRODUCTS:.0%} of the products, {_READING:.0%} of the memory's speed and {_INSTRUCTIONS:.0%} of "
        "the instructions a second in the GPU's data sheet",
    )
    return _Part(num_forwards * max(products, reading) + noise, assumptions)


def _host(config: RunConfig, model: ModelSizes, num_gpus: int) -> _Part:
    gathers = (config.partition_size or num_gpus) > 1
    milliseconds = HOST_MS_SHARDED if gathers else HOST_MS_WHOLE
    text = f"{milliseconds} ms of Python for a block, as on a CPU that was measured"
    return _Part(num_passes(config) / num_gpus * model.num_blocks * milliseconds / 1e3, (text,))
