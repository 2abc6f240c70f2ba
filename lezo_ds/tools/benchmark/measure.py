"""Measurements of steps and of replay in interleaved rounds, as rows of the table."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lezo_ds import distributed
from lezo_ds.errors import LezoError
from lezo_ds.tools.benchmark.inputs import Inputs
from lezo_ds.tools.benchmark.settings import Variant
from lezo_ds.tools.benchmark.sharded import EngineSteps
from lezo_ds.tools.benchmark.steps import Steps, start_steps

Row = dict[str, Any]
"""Values by column; see `lezo_ds.tools.benchmark.table.COLUMNS`."""

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
WARM_UP_STEPS = 2  # DeepSpeed records the order of the modules in the first pass, and prefetches after it


def synchronize() -> None:
    """Wait until the GPU has done all its work; does nothing on a CPU."""
    if _on_gpu():
        torch.cuda.synchronize()


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


def measure_steps(
    open_inputs: Callable[[], Inputs],
    variants: Sequence[Variant],
    *,
    rounds: int,
    threads: int = 1,
    replay: bool = False,
) -> list[Row]:
    """Measure variants of a step and return their rows. A collective.

    Args:
        open_inputs: returns the model and the batches; called when the ranks have met.
        variants: at least one; ratios are relative to the first.
        rounds: timed steps of each variant.
        threads: CPU threads of this rank.
        replay: also replay the timed steps of our variants.

    Raises:
        UserError: bad inputs, such as a batch that does not split, or a setting that DeepSpeed does not
            accept.
        LezoError: a variant skipped its update.
    """
    distributed.init_distributed()
    torch.set_num_threads(threads)
    inputs = open_inputs()
    # Each of the two models is made when a variant first needs it. Variants of the same model all change its
    # weights.
    plain, engine = functools.cache(inputs.plain_model), functools.cache(inputs.start_engine)
    steps = {variant.text: start_steps(variant, inputs, plain=plain, engine=engine) for variant in variants}
    actions = {name: partial(_checked_step, name, entry) for name, entry in steps.items()}
    for action in actions.values():
        for _ in range(WARM_UP_STEPS):
            action()
    times = interleaved(actions, rounds)
    rows = []
    for variant in variants:
        name, entry = variant.text, steps[variant.text]
        who = {"variant": name, "sparsity": variant.sparsity}
        if replay and isinstance(entry, EngineSteps):
            replayed = time_once(partial(entry.replay, rounds)) / rounds
            columns = time_columns([replayed], [statistics.mean(times[name])]) | {"rounds": rounds}
            rows.append({"measured": "replay", **who, "reference": "training", **columns})
        measured = time_columns(times[name], times[variants[0].text])
        timed = range(WARM_UP_STEPS, WARM_UP_STEPS + rounds)
        measured |= {
            "fed_tokens": round(statistics.mean(map(entry.fed_tokens, timed))),
            "weight_bytes": entry.weight_bytes,
            "peak_bytes": peak_bytes(actions[name]),
            "gathered_bytes": _gathered_bytes(actions[name]),
        }
        rows.append({"measured": "step", **who, "reference": variants[0].text, **measured})
    where = {"ranks": distributed.world_size(), "threads": threads, "load": os.getloadavg()[0]}
    return [{**inputs.columns, **where, **row} for row in rows]


def _checked_step(name: str, steps: Steps) -> None:
    gradient = steps.step()
    if gradient == 0 or not math.isfinite(gradient):
        raise LezoError(
            f"{name} skipped its update, so its time means nothing; got: projected gradient {gradient}; "
            "fix: use another dtype or model"
        )


def _gathered_bytes(action: Callable[[], object]) -> int:
    with distributed.counted_bytes() as counts:
        action()
    gathered = sum(count for operation, count in counts.items() if "all_gather" in operation)
    return gathered * distributed.world_size()


def peak_bytes(step: Callable[[], object]) -> int | None:
    """Run a step and return its peak memory above what was in use before; None if it cannot be known.

    On a GPU this is memory of torch's allocator, on Linux without a GPU resident memory of this process.
    """
    if _on_gpu():
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        synchronize()
        return torch.cuda.max_memory_allocated() - before
    if not _CLEAR_REFS.exists():
        step()
        return None
    # glibc keeps freed memory resident, which would hide what the step needs.
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR_REFS.write_text("5")  # resets VmHWM; see proc(5)
    before = _resident("VmRSS")
    step()
    return max(0, _resident("VmHWM") - before)


def _on_gpu() -> bool:
    return distributed.device().type == "cuda"


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
