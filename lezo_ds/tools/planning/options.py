"""The ways to run a recipe on given GPUs: which of them fit, and which one is best."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig, check_world, num_passes
from lezo_ds.errors import UserError
from lezo_ds.forward.perturbed_forward import COPIES_AT_ONCE
from lezo_ds.tools.planning.inputs import InputSizes, assumed_inputs
from lezo_ds.tools.planning.memory import GIB, RankMemory, rank_memory
from lezo_ds.tools.planning.model_sizes import ModelSizes, model_sizes
from lezo_ds.zo.updates import UpdatePrecision

_OFFLOAD_CONFIG = "ds_configs/zero3_cpu_offload.json"
_EVAL_BATCH_SIZES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class PlanOption:
    """One way to run a recipe.

    Attributes:
        config: the recipe with the largest batches that fit, or the smallest possible ones.
        memory: memory of each rank.
        fits: whether a GPU has that much.
    """

    config: RunConfig
    memory: RankMemory
    fits: bool


@dataclass(frozen=True)
class Plan:
    """The options to run a recipe.

    Attributes:
        recipe: configuration that was planned for.
        num_gpus: number of GPUs, with one rank on each.
        gpu_bytes: memory of each GPU in bytes.
        model: sizes of the model.
        inputs: sizes of the longest inputs.
        options: all options in the order of preference.
        chosen: the first option that fits.
    """

    recipe: RunConfig
    num_gpus: int
    gpu_bytes: int
    model: ModelSizes
    inputs: InputSizes
    options: tuple[PlanOption, ...]
    chosen: PlanOption


def make_plan(
    recipe: RunConfig,
    *,
    num_gpus: int,
    gpu_bytes: int,
    length: int | None = None,
) -> Plan:
    """Compute every option to run a recipe, and choose one.

    The options differ in what does not change what the run learns from: the ranks that share the weights, the
    precision of updates, the sizes of micro-batches, and whether the weights are offloaded. Options that keep
    all bits of an update come first, then those with the fewest ranks that share weights, because gathered
    weights are most of the traffic. Weights are offloaded only if nothing fits otherwise.

    Args:
        recipe: configuration of the run.
        num_gpus: number of GPUs, with one rank on each.
        gpu_bytes: memory of each GPU in bytes.
        length: tokens of the longest input; None for an assumption from the task.

    Raises:
        UserError: the model cannot be found, the batch does not divide among the GPUs, the GPUs do not fill
            whole nodes, or nothing fits.
    """
    model = model_sizes(recipe)
    if length is not None and model.max_length is not None and length > model.max_length:
        raise UserError(
            "--length is longer than the model has positions for",
            got=length,
            expected=f"1 to {model.max_length}",
            fix=f"give --length {model.max_length}",
        )
    inputs = assumed_inputs(recipe, model, length)

    def option(config: RunConfig) -> PlanOption:
        memory = rank_memory(config, model, inputs, world_size=num_gpus)
        return PlanOption(config, memory, memory.total <= gpu_bytes)

    options: list[PlanOption] = []
    smallest = _with_probes(recipe, COPIES_AT_ONCE)
    for start in (smallest, replace(smallest, deepspeed=_OFFLOAD_CONFIG)):
        if not any(found.fits for found in options):
            offloads = option(start).memory.host > 0
            spreads = _spreads(start, num_gpus, offloads)
            options += [_first_that_fits(map(option, _batches(spread, num_gpus))) for spread in spreads]
    fitting = [found for found in options if found.fits]
    if not fitting:
        least = min((found.memory for found in options), key=lambda memory: memory.total)
        raise UserError(
            f"{recipe.model.path} does not fit, not even with its weights in the hosts' memory",
            got=f"at least {least} on each of {num_gpus} GPUs",
            expected=f"at most {gpu_bytes / GIB:g} GiB",
            fix="use more or larger GPUs, a smaller model, or a shorter --length",
        )
    return Plan(recipe, num_gpus, gpu_bytes, model, inputs, tuple(options), fitting[0])


def _first_that_fits(options: Iterable[PlanOption]) -> PlanOption:
    """Return the first option that fits, or else the last option."""
    for option in options:
        if option.fits:
            break
    return option


def _with_probes(config: RunConfig, probes_per_pass: int) -> RunConfig:
    """Return a configuration with another number of probes in a pass, if its results stay the same."""
    if config.zo.probes_per_pass % COPIES_AT_ONCE:
        return config
    return replace(config, zo=replace(config.zo, probes_per_pass=probes_per_pass))


def _spreads(config: RunConfig, num_gpus: int, offloads: bool) -> list[RunConfig]:
    """Return a configuration for each way to store and to share the weights, in the order of preference."""
    precisions: tuple[UpdatePrecision, ...] = (config.zo.update_precision,)
    if config.method in ZEROTH_ORDER and config.model.dtype != "fp32":
        # An adapter's low bits are too few to save memory by rounding.
        precisions = ("fp32_master", "stochastic") if config.peft.kind == "none" else ("fp32_master",)
    sizes = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0]
    if config.method == "adamw" or offloads:  # a host has room for one copy of the model
        sizes = [num_gpus]
    return [
        replace(
            config,
            zo=replace(config.zo, update_precision=precision),
            partition_size=None if size == num_gpus else size,
        )
        for precision, size in itertools.product(precisions, sizes)
    ]


def _batches(config: RunConfig, num_gpus: int) -> Iterator[RunConfig]:
    """Yield the configuration with each pair of batch sizes, the largest micro-batches first.

    Raises:
        UserError: no micro-batch size gives all GPUs the same number of micro-batches.
    """
    sizes = [size for size in range(config.train.batch_size, 0, -1) if config.train.batch_size % size == 0]
    if config.method not in TRAINED:
        sizes = [config.train.micro_batch_size]
    found = False
    for micro_batch_size, eval_batch_size in itertools.product(sizes, _EVAL_BATCH_SIZES):
        train = replace(config.train, micro_batch_size=micro_batch_size, eval_batch_size=eval_batch_size)
        sized = replace(config, train=train)
        if config.method not in TRAINED or num_passes(sized) % num_gpus == 0:
            found = True
            yield sized
    if not found:
        check_world(config, num_gpus)
