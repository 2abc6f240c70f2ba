"""Measurements as rows of the table: variants of a step in interleaved rounds, and replay of their records."""

from __future__ import annotations

import gc
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lezo_ds import distributed
from lezo_ds.engine.lezo_engine import LezoEngine
from lezo_ds.errors import LezoError
from lezo_ds.tools.benchmark import sharded
from lezo_ds.tools.benchmark.inputs import plain_model
from lezo_ds.tools.benchmark.reference import InPlaceSteps, plain_steps
from lezo_ds.tools.benchmark.settings import Setting, Variant
from lezo_ds.tools.benchmark.stages import peak_bytes, stage_seconds, synchronize
from lezo_ds.tools.opt_shapes import opt_config

Row = dict[str, Any]
"""Values by column; see `lezo_ds.tools.benchmark.table.COLUMNS`."""

WARM_UP_STEPS = 2  # DeepSpeed records the order of the modules in the first pass, and prefetches after it
_PLAIN = ("mezo_reference", "mezo_fused")


def time_once(action: Callable[[], object]) -> float:
    """Return the seconds from when all ranks begin an action until all are done, GPUs included. A collective."""
    synchronize()
    distributed.barrier()
    start = time.perf_counter()
    action()
    synchronize()
    distributed.barrier()
    return time.perf_counter() - start


def interleaved(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time each action once per round, so that all of them see the same changes of the machine's speed."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            times[name].append(time_once(action))
    return times


def time_columns(seconds: Sequence[float], reference: Sequence[float]) -> Row:
    """Return the columns of timed rounds.

    Args:
        seconds: per step or call, one entry per round.
        reference: the same for the reference in the same rounds.
    """
    ratios = [theirs / own for theirs, own in zip(reference, seconds, strict=True)]
    return {
        "rounds": len(seconds),
        "seconds_min": min(seconds),
        "seconds_median": statistics.median(seconds),
        "seconds_max": max(seconds),
        "ratio": statistics.median(ratios),
    }


def measure_steps(
    settings: Iterable[Setting],
    variants: Sequence[Variant],
    *,
    rounds: int,
    threads: int = 1,
    replay: bool = False,
) -> Iterator[list[Row]]:
    """Measure variants of a step under one setting after the other, and yield the rows of each. A collective.

    Args:
        settings: those of the same model follow each other.
        variants: what is compared; ratios are relative to the first.
        rounds: timed steps of each variant.
        threads: CPU threads of this rank.
        replay: also replay the timed steps of our variants.

    Raises:
        UserError: a batch that does not split, or a setting that DeepSpeed does not accept.
    """
    distributed.init_distributed()
    torch.set_num_threads(threads)
    for _, group in itertools.groupby(settings, key=lambda setting: setting.model):
        same_model = list(group)
        models = Models(same_model[0], variants)
        for given in same_model:
            setting = replace(given, micro_batches=given.micro_batches or distributed.world_size())
            origin = {
                **setting.columns(),
                "parameters": models.num_parameters,
                "ranks": distributed.world_size(),
                "threads": threads,
            }
            rows = _measure(models, setting, variants, rounds, replay)
            yield [origin | {"load": os.getloadavg()[0]} | row for row in rows]
        models.free()


class Models:
    """The models that variants run: one plain model per rank, and one sharded model. To make them is a collective.

    Both start with the same weights. The variants that share a model all change it.

    Args:
        setting: says which model.
        variants: a model that none of them needs is not made.
    """

    def __init__(self, setting: Setting, variants: Sequence[Variant]) -> None:
        self.plain: nn.Module | None = None
        self.engine: LezoEngine | None = None
        if any(variant.kind in _PLAIN for variant in variants):
            config = opt_config(setting.shape, setting.layers)
            self.plain = plain_model(config, setting.dtype, distributed.device())
        if any(variant.kind not in _PLAIN for variant in variants):
            self.engine = sharded.start_engine(setting)

    @property
    def num_parameters(self) -> int:
        """Number of weights of one model."""
        if self.engine is not None:
            return sharded.num_parameters(self.engine)
        assert self.plain is not None, "a benchmark without variants"
        return sum(parameter.numel() for parameter in self.plain.parameters())

    def steps(self, variant: Variant, setting: Setting) -> InPlaceSteps | sharded.EngineSteps:
        """Return a variant's steps."""
        if variant.kind in _PLAIN:
            assert self.plain is not None
            return plain_steps(variant, self.plain, setting.workload)
        assert self.engine is not None
        if variant.kind == "naive_zero3":
            return sharded.naive_steps(variant, self.engine, setting.workload)
        assert setting.micro_batches is not None
        return sharded.EngineSteps(variant, self.engine, setting.workload, setting.micro_batches)

    def free(self) -> None:
        """Give the memory of the models back."""
        if self.engine is not None:
            sharded.discard(self.engine)
        self.plain = self.engine = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _measure(
    models: Models, setting: Setting, variants: Sequence[Variant], rounds: int, replay: bool
) -> Iterator[Row]:
    """Yield a row per variant and, if `replay` is set, one more for each of ours."""
    steps = {variant.text: models.steps(variant, setting) for variant in variants}
    actions = {name: partial(_checked_step, name, entry.step) for name, entry in steps.items()}
    for action in actions.values():
        for _ in range(WARM_UP_STEPS):
            action()
    times = interleaved(actions, rounds)
    first = variants[0].text
    for variant in variants:
        name = variant.text
        row = {"measured": "step", "reference": first, "weight_bytes": steps[name].weight_bytes}
        methods = sharded.staged_methods(models.engine) if models.engine is not None else ()
        yield (
            row
            | variant.columns()
            | time_columns(times[name], times[first])
            | _traffic(actions[name])
            | {"peak_bytes": peak_bytes(actions[name])}
            | {f"{stage}_seconds": spent for stage, spent in stage_seconds(actions[name], methods).items()}
        )
    for variant in variants if replay else ():
        ours = steps[variant.text]
        if isinstance(ours, sharded.EngineSteps):
            row = {"measured": "replay", "reference": "training", "steps": rounds}
            replayed = time_once(partial(ours.replay, rounds)) / rounds
            trained = statistics.mean(times[variant.text])
            yield row | variant.columns() | time_columns([replayed], [trained])


def _checked_step(name: str, step: Callable[[], float]) -> None:
    gradient = step()
    if gradient == 0 or not math.isfinite(gradient):
        raise LezoError(
            f"{name} skipped its update, so its time means nothing; got: projected gradient {gradient}; "
            "fix: use another --dtype or --shape"
        )


def _traffic(action: Callable[[], object]) -> Row:
    with distributed.counted_bytes() as counts:
        action()
    gathered = sum(count for operation, count in counts.items() if "all_gather" in operation)
    return {
        "gathered_bytes": gathered * distributed.world_size(),
        "other_bytes": sum(counts.values()) - gathered,
    }
