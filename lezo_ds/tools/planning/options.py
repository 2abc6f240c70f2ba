"""The ways to run a recipe on given GPUs: which of them fit, and which one is best."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig, check_world, make_estimator, num_passes
from lezo_ds.errors import UserError
from lezo_ds.forward.perturbed_modules import COPIES_AT_ONCE
from lezo_ds.tools.planning.hardware import Cluster
from lezo_ds.tools.planning.inputs import InputSizes, assumed_inputs
from lezo_ds.tools.planning.memory import GIB, RankMemory, rank_memory
from lezo_ds.tools.planning.model_sizes import ModelSizes, model_sizes
from lezo_ds.tools.planning.step_time import StepTime, step_time
from lezo_ds.tools.planning.traffic import StepTraffic, step_traffic
from lezo_ds.zo.precision import UpdatePrecision

_OFFLOAD_CONFIG = "ds_configs/zero3_cpu_offload.json"
_EVAL_BATCH_SIZES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class PlanOption:
    """One way to run a recipe.

    Attributes:
        config: the recipe with the largest batches that fit, or the smallest possible ones.
        memory: memory of each rank.
        fits: whether a GPU has that much.
        traffic: traffic of a rank in a step; None for methods that are not zeroth-order.
        time: an estimate of a step's time; None if there is none (see `step_time`).
    """

    config: RunConfig
    memory: RankMemory
    fits: bool
    traffic: StepTraffic | None
    time: StepTime | None


@dataclass(frozen=True)
class Plan:
    """The options to run a recipe.

    Attributes:
        recipe: configuration that was planned for.
        num_gpus: number of GPUs, with one rank on each.
        gpu_bytes: memory of each GPU in bytes.
        cluster: where the GPUs are.
        model: sizes of the model.
        inputs: sizes of the longest inputs.
        options: all options in the order of preference.
        chosen: the fastest of the options that fit and keep as many bits of an update as the first of them;
            the first if no times are known.
    """

    recipe: RunConfig
    num_gpus: int
    gpu_bytes: int
    cluster: Cluster
    model: ModelSizes
    inputs: InputSizes
    options: tuple[PlanOption, ...]
    chosen: PlanOption

    @property
    def fastest(self) -> PlanOption:
        """The fastest option that fits, however it keeps an update; the chosen one if no times are known."""
        return _fastest([self.chosen, *(option for option in self.options if option.fits)])


def make_plan(
    recipe: RunConfig,
    *,
    num_gpus: int,
    gpu_bytes: int,
    length: int | None = None,
    cluster: Cluster | None = None,
) -> Plan:
    """Compute every option to run a recipe, and choose one.

    The options differ in what does not change what the run learns from: the ranks that share the weights, the
    precision of updates, the sizes of micro-batches, the number of pairs of probes in a pass, and whether the
    weights are offloaded. Options that keep all bits of an update come first. Among those, the fastest is
    chosen; without times, the one with the fewest ranks that share weights, because gathered weights are most
    of the traffic. Weights are offloaded only if nothing fits otherwise.

    Args:
        recipe: configuration of the run.
        num_gpus: number of GPUs, with one rank on each.
        gpu_bytes: memory of each GPU in bytes.
        length: tokens of the longest input; None for an assumption from the task.
        cluster: where the GPUs are, for the times; None if nothing is known.

    Raises:
        UserError: the model cannot be found, the batch does not divide among the GPUs, the GPUs do not fill
            whole nodes, or nothing fits.
    """
    cluster = cluster or Cluster()
    cluster.node_size(num_gpus)
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
        traffic = time = None
        if config.method in ZEROTH_ORDER:
            traffic = step_traffic(config, model, memory, num_gpus)
            time = step_time(config, model, inputs, traffic, cluster=cluster, num_gpus=num_gpus)
        return PlanOption(config, memory, memory.total <= gpu_bytes, traffic, time)

    options: list[PlanOption] = []
    smallest = _with_probes(recipe, COPIES_AT_ONCE)
    for start in (smallest, replace(smallest, deepspeed=_OFFLOAD_CONFIG)):
        if not any(found.fits for found in options):
            offloads = option(start).memory.host > 0
            spreads = _spreads(start, num_gpus, offloads)
            sized = [_first_that_fits(map(option, _batches(spread, num_gpus))) for spread in spreads]
            options += [_with_most_probes(found, option, num_gpus) for found in sized]
    fitting = [found for found in options if found.fits]
    if not fitting:
        least = min((found.memory for found in options), key=lambda memory: memory.total)
        raise UserError(
            f"{recipe.model.path} does not fit, not even with its weights in the hosts' memory",
            got=f"at least {least} on each of {num_gpus} GPUs",
            expected=f"at most {gpu_bytes / GIB:g} GiB",
            fix="use more or larger GPUs, a smaller model, or a shorter --length",
        )
    precision = fitting[0].config.zo.update_precision
    chosen = _fastest([found for found in fitting if found.config.zo.update_precision == precision])
    return Plan(recipe, num_gpus, gpu_bytes, cluster, model, inputs, tuple(options), chosen)


def _fastest(options: Sequence[PlanOption]) -> PlanOption:
    """Return the first of the fastest options, or the first option if no times are known."""
    return min(options, key=lambda option: option.time.total if option.time else 0.0)


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


def _with_most_probes(
    found: PlanOption, option: Callable[[RunConfig], PlanOption], num_gpus: int
) -> PlanOption:
    """Return an option with the fewest passes in a step that fits, since each pass gathers all weights."""
    if found.traffic is None or found.traffic.gathered + found.traffic.from_host == 0:
        return found
    num_pairs = -(-make_estimator(found.config.zo).num_probes // COPIES_AT_ONCE)
    for num_parts in range(1, num_pairs):
        pairs = -(-num_pairs // num_parts)  # about as many in each pass, since ranks wait for each other
        more = option(_with_probes(found.config, COPIES_AT_ONCE * pairs))
        if more.fits and num_passes(more.config) % num_gpus == 0:
            return more
    return found


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
