"""Measurements of steps and of replay, as rows of the table."""

from __future__ import annotations

import gc
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from lezo_ds import distributed
from lezo_ds.engine.lezo_engine import LezoEngine
from lezo_ds.errors import LezoError
from lezo_ds.sharding.checkpoint_files import build_on_meta
from lezo_ds.tools.benchmark import sharded
from lezo_ds.tools.benchmark.inputs import plain_model
from lezo_ds.tools.benchmark.reference import InPlaceSteps, plain_steps
from lezo_ds.tools.benchmark.settings import Setting, Variant
from lezo_ds.tools.benchmark.stages import peak_bytes, stage_seconds, synchronize
from lezo_ds.tools.opt_shapes import opt_config

Row = dict[str, Any]
"""Values by column; see `lezo_ds.tools.benchmark.table.COLUMNS`."""

WARM_UP_STEPS = 2  # DeepSpeed records the order of the modules in the first pass, and prefetches after it
_MODEL = attrgetter("shape", "layers", "ds_config", "partition_size", "dtype", "update_precision")


def time_once(action: Callable[[], object]) -> float:
    """Return the seconds from the start of an action on all ranks to its end on all. A collective."""
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


class Models:
    """A plain model and a sharded one, each made when a variant first needs it, which is a collective.

    The variants that share a model all change its weights.

    Args:
        setting: says which model.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._config = opt_config(setting.shape, setting.layers)

    @cached_property
    def plain(self) -> nn.Module:
        """Every rank's own model."""
        return plain_model(self._config, self._setting.dtype, distributed.device())

    @cached_property
    def engine(self) -> LezoEngine:
        """The model that the ranks share."""
        return sharded.start_engine(self._setting)

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        return sum(p.numel() for p in build_on_meta(self._config, torch.float32).parameters())

    def steps(self, variant: Variant, setting: Setting) -> InPlaceSteps | sharded.EngineSteps:
        """Return a variant's steps."""
        if variant.kind in ("mezo_reference", "mezo_fused"):
            return plain_steps(variant, self.plain, setting.workload)
        if variant.kind == "naive_zero3":
            return sharded.naive_steps(variant, self.engine, setting.workload)
        return sharded.EngineSteps(variant, self.engine, setting)

    def free(self) -> None:
        """Give the memory of the models back. They cannot be used any more."""
        if "engine" in vars(self):
            sharded.discard(self.engine)
        vars(self).clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


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
        settings: those of the same model are adjacent.
        variants: ratios are relative to the first; without variants nothing is measured.
        rounds: timed steps of each variant.
        threads: CPU threads of this rank.
        replay: also replay the timed steps of our variants.

    Raises:
        UserError: a batch that does not split, or a setting that DeepSpeed does not accept.
    """
    distributed.init_distributed()
    torch.set_num_threads(threads)
    if not variants:
        return
    ranks = distributed.world_size()
    for _, same_model in itertools.groupby(settings, key=_MODEL):
        adjacent = [replace(given, micro_batches=given.micro_batches or ranks) for given in same_model]
        models = Models(adjacent[0])
        for setting in adjacent:
            rows = _measure(models, setting, variants, rounds=rounds, replay=replay)
            origin = setting.columns() | {"parameters": models.num_parameters, "ranks": ranks}
            yield [origin | {"threads": threads, "load": os.getloadavg()[0]} | row for row in rows]
        models.free()


def _measure(
    models: Models, setting: Setting, variants: Sequence[Variant], *, rounds: int, replay: bool
) -> Iterator[Row]:
    steps = {variant.text: models.steps(variant, setting) for variant in variants}
    actions = {name: partial(_checked_step, name, entry) for name, entry in steps.items()}
    for action in actions.values():
        for _ in range(WARM_UP_STEPS):
            action()
    times = interleaved(actions, rounds)
    first = variants[0].text
    for variant in variants:
        action, entry = actions[variant.text], steps[variant.text]
        if replay and isinstance(entry, sharded.EngineSteps):
            replayed = time_once(partial(entry.replay, rounds)) / rounds
            trained = statistics.mean(times[variant.text])
            row = {"measured": "replay", "reference": "training", "steps": rounds}
            yield row | variant.columns() | time_columns([replayed], [trained])
        yield {
            "measured": "step",
            **variant.columns(),
            "reference": first,
            **time_columns(times[variant.text], times[first]),
            "weight_bytes": entry.weight_bytes,
            "peak_bytes": peak_bytes(action),
            **_traffic(action),
            **stage_seconds(action, entry.staged_methods),
        }


def _checked_step(name: str, steps: InPlaceSteps | sharded.EngineSteps) -> None:
    gradient = steps.step()
    if gradient == 0 or not math.isfinite(gradient):
        raise LezoError(
            f"{name} skipped its update, so its time means nothing; got: projected gradient {gradient}; "
            "fix: use another --dtype or --shape"
        )


def _traffic(action: Callable[[], object]) -> Row:
    with distributed.counted_bytes() as counts:
        action()
    gathered = sum(count for operation, count in counts.items() if "all_gather" in operation)
    total = sum(counts.values())
    return {"gathered_bytes": gathered * distributed.world_size(), "other_bytes": total - gathered}
