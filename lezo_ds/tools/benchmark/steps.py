"""Times the variants of a step against each other, in interleaved rounds in one process."""

from __future__ import annotations

import gc
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lezo_ds import distributed
from lezo_ds.ds_config import load_ds_config
from lezo_ds.engine.lezo_engine import LezoEngine, initialize
from lezo_ds.errors import LezoError
from lezo_ds.journal import StepRecord
from lezo_ds.sharding import zero3
from lezo_ds.tools.benchmark.memory import peak_memory
from lezo_ds.tools.benchmark.results import Cell, Elapsed, ModelSettings, Replay, Settings, Timing
from lezo_ds.tools.benchmark.shapes import opt_config, plain_model, random_weights, write_empty_model
from lezo_ds.tools.benchmark.stages import StageClock
from lezo_ds.tools.benchmark.variants import (
    RUN_SEED,
    Variant,
    VariantName,
    mezo_reference,
    naive_zero3,
    ours,
    ours_config,
)

WARM_UP_STEPS = 2  # DeepSpeed records the order of the modules in the first pass, and prefetches after it
STAGE_STEPS = 2
PLAIN = ("mezo_reference", "mezo_fused")
"""The variants that run a plain model."""


def measure_steps(
    settings: Sequence[Settings], names: Sequence[VariantName], replay_steps: int = 0
) -> Iterator[Cell]:
    """Time variants of a step, with one set of settings after the other. A collective.

    Args:
        settings: what is measured; those of the same model next to each other.
        names: of the variants; ratios are taken to the first.
        replay_steps: so many steps of each of our variants are trained and replayed, too.

    Raises:
        UserError: a batch that does not split, settings DeepSpeed does not take.
    """
    distributed.init_distributed()
    clock = StageClock(distributed.device())
    for model_settings, group in itertools.groupby(settings, key=lambda entry: entry.model):
        models = Models(model_settings, names)
        for entry in group:
            torch.set_num_threads(entry.threads)
            yield _measure_cell(models, entry, names, clock, replay_steps)
        models.free()


class Models:
    """What the variants run: those of ZeRO-3 share one sharded model, the others one plain model a rank.

    Both begin with the same weights, and then each variant changes those it shares. To make them is a
    collective.

    Args:
        settings: of the model.
        names: of the variants; what none of them needs is not made.
    """

    def __init__(self, settings: ModelSettings, names: Sequence[VariantName]) -> None:
        self.plain: nn.Module | None = None
        self.engine: LezoEngine | None = None
        if any(name.kind in PLAIN for name in names):
            config = opt_config(settings.shape, settings.num_blocks)
            self.plain = plain_model(config, settings.dtype, distributed.device())
        if any(name.kind not in PLAIN for name in names):
            self.engine = start_engine(settings)

    @property
    def num_parameters(self) -> int:
        """Number of weights, each counted once."""
        if self.plain is not None:
            return sum(parameter.numel() for parameter in self.plain.parameters())
        assert self.engine is not None, "a benchmark of no variant"
        return sum(parameter.numel for parameter in self.engine.weights.parameters)

    def variant(self, name: VariantName, settings: Settings, clock: StageClock) -> Variant:
        """Make a variant."""
        if name.kind in PLAIN:
            assert self.plain is not None
            return mezo_reference(name, self.plain, settings.workload, clock)
        assert self.engine is not None
        if name.kind == "naive_zero3":
            return naive_zero3(name, self.engine, settings.workload, clock)
        return ours(name, self.engine, settings.workload, num_micro_batches(settings), clock)

    def free(self) -> None:
        """Give the memory of the models back."""
        if self.engine is not None:
            zero3.discard_shards(self.engine.weights.parameters)
            self.engine.weights.low_bits.clear()
        self.plain = self.engine = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def num_micro_batches(settings: Settings) -> int:
    """Return into how many micro-batches our step splits the batch."""
    return settings.num_micro_batches or distributed.world_size()


def start_engine(settings: ModelSettings) -> LezoEngine:
    """Return our engine on a sharded model with random weights. A collective."""
    distributed.init_distributed()
    ds_config = load_ds_config(settings.deepspeed, settings.dtype, distributed.world_size(), 1)
    config = ours_config(VariantName.parse("ours"), settings.precision)
    with ExitStack() as stack:
        # On one host: the other ranks read what the first writes.
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if distributed.rank() == 0 else None
        directory = Path(distributed.broadcast_object(folder))
        model_config = opt_config(settings.shape, settings.num_blocks)
        distributed.on_rank_zero(lambda: write_empty_model(model_config, settings.dtype, directory))
        engine = initialize(
            str(directory),
            config,
            ds_config,
            settings.dtype,
            RUN_SEED,
            partition_size=settings.partition_size,
        )
        distributed.barrier()
    fill_with_random_weights(engine)
    return engine


def fill_with_random_weights(engine: LezoEngine) -> None:
    """Give every shard the weights of `random_weights`."""
    for parameter in engine.weights.parameters:
        parameter_id = parameter.named.parameter_id
        values = random_weights(parameter.name, parameter_id, parameter.start, parameter.count, engine.device)
        engine.weights.fill(parameter, values)
    zero3.finish_updates()


def time_once(action: Callable[[], object]) -> Elapsed:
    """Time an action from when all ranks begin until all are done, on the device too. A collective."""
    zero3.finish_updates()
    distributed.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    action()
    zero3.finish_updates()
    cpu_seconds = time.process_time() - cpu_start
    distributed.barrier()
    return Elapsed(time.perf_counter() - start, cpu_seconds)


def _measure_cell(
    models: Models, settings: Settings, names: Sequence[VariantName], clock: StageClock, replay_steps: int
) -> Cell:
    variants = [models.variant(name, settings, clock) for name in names]
    elapsed = _interleaved_rounds(variants, settings.rounds)
    timings = tuple(_examine(variant, elapsed[variant.name], clock) for variant in variants)
    replays = {}
    if replay_steps and models.engine is not None:
        replays = {
            name.text: _time_replay(models.engine, settings, name, replay_steps)
            for name in names
            if name.kind == "ours"
        }
    load = os.getloadavg()[0]
    return Cell(settings, distributed.world_size(), models.num_parameters, load, timings, replays)


def _interleaved_rounds(variants: Sequence[Variant], rounds: int) -> dict[str, tuple[Elapsed, ...]]:
    for variant in variants:
        for _ in range(WARM_UP_STEPS):
            _checked_step(variant)
    timed: dict[str, tuple[Elapsed, ...]] = {variant.name: () for variant in variants}
    for _ in range(rounds):
        for variant in variants:
            timed[variant.name] += (time_once(partial(_checked_step, variant)),)
    return timed


def _checked_step(variant: Variant) -> None:
    gradient = variant.step()
    if gradient == 0 or not math.isfinite(gradient):
        raise LezoError(
            f"{variant.name} skipped its update, so its time means nothing; got: projected gradient "
            f"{gradient}; fix: another --dtype or --shape"
        )


def _examine(variant: Variant, elapsed: tuple[Elapsed, ...], clock: StageClock) -> Timing:
    with peak_memory(distributed.device()) as peak:
        _checked_step(variant)
    with distributed.counted_bytes() as counts:
        _checked_step(variant)
    gathered = sum(count for operation, count in counts.items() if "all_gather" in operation)
    stages, host_stages = _stage_seconds(variant, clock)
    total = sum(stages.values())
    return Timing(
        name=variant.name,
        elapsed=elapsed,
        stages={name: seconds / total for name, seconds in stages.items()},
        host_stages={name: seconds / STAGE_STEPS for name, seconds in host_stages.items()},
        weight_bytes=variant.weight_bytes,
        peak_bytes=peak.num_bytes,
        gathered_bytes=gathered * distributed.world_size(),
        other_bytes=sum(counts.values()) - gathered,
    )


def _stage_seconds(variant: Variant, clock: StageClock) -> tuple[dict[str, float], dict[str, float]]:
    with variant.timed_stages():
        clock.running = True
        for _ in range(STAGE_STEPS):
            zero3.finish_updates()
            distributed.barrier()
            with clock.stage("other"):
                _checked_step(variant)
        clock.running = False
    return clock.take()


def _time_replay(engine: LezoEngine, settings: Settings, name: VariantName, num_steps: int) -> Replay:
    trained = engine.with_config(ours_config(name, settings.model.precision))
    batch = settings.workload.micro_batches(num_micro_batches(settings))
    records: list[StepRecord] = []

    def train() -> None:
        records.extend(trained.train_batch(batch, settings.workload.loss) for _ in range(num_steps))

    return Replay(num_steps, time_once(train), time_once(lambda: engine.weights.apply(records)))
