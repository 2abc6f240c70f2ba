"""What a step costs the host: Python calls, messages, operator launches and CPU time.

The model has the modules of OPT-13b, but so few weights that nearly all time of a step is the host's. Counts
do not depend on the machine or its load. Times do, so they are compared in the same rounds.
"""

from __future__ import annotations

import cProfile
import importlib.util
import logging
import multiprocessing
import pstats
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lezo_ds import distributed
from lezo_ds.config import Dtype
from lezo_ds.distributed.fake_group import join_fake_group
from lezo_ds.forward.batch import MicroBatch, to_device
from lezo_ds.noise import select
from lezo_ds.tools.benchmark.measure import WARM_UP_STEPS
from lezo_ds.tools.benchmark.random_inputs import RandomInputs
from lezo_ds.tools.benchmark.settings import Variant, typical_setting
from lezo_ds.tools.benchmark.steps import Steps, start_steps

Figures = dict[str, float]
"""Numbers by what they count."""

logger = logging.getLogger(__name__)

SHAPE = "opt-13b-thin"
FAKE_RANKS = 2
_SPARSITIES = {"s=.75": "ours:0.75", "dense": "ours:0"}
_PUBLISHED = "mezo_reference"
_NO_KERNELS = ("_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty")


def measure_host(rounds: int) -> Figures:
    """Return all figures. Each part runs in a process of its own, with one thread.

    Args:
        rounds: timed steps of each variant; the least time counts.
    """
    figures: Figures = {}
    for part in (partial(_one_rank, rounds), partial(_sharded, rounds), partial(_launches, rounds)):
        # DeepSpeed and torch keep state for the whole process, such as the process group.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            figures |= pool.submit(part).result()
    return figures


def _one_rank(rounds: int) -> Figures:
    distributed.init_distributed()
    inputs = _inputs("fp32")
    steps = _start(inputs, _PUBLISHED, *_SPARSITIES.values())
    model = inputs.plain_model()
    (batch,) = [to_device(batch, distributed.device()) for batch in inputs.batches(0)]
    figures: Figures = {"Python calls, plain forward": _profiled(partial(model, **batch.inputs)).total_calls}
    for name, variant in _SPARSITIES.items():
        figures[f"Python calls, 1 rank, {name}"] = _profiled(steps[variant].step).total_calls
    milliseconds = _least_milliseconds({name: entry.step for name, entry in steps.items()}, rounds)
    figures["CPU ms, MeZO's published loop"] = milliseconds[_PUBLISHED]
    for name, variant in _SPARSITIES.items():
        figures[f"CPU ms, 1 rank, {name}"] = milliseconds[variant]
        figures[f"CPU ms over MeZO's, 1 rank, {name}"] = milliseconds[variant] / milliseconds[_PUBLISHED]
    distributed.shut_down()
    return figures


def _sharded(rounds: int) -> Figures:
    join_fake_group(FAKE_RANKS)
    steps = _start(_inputs("fp32"), *_SPARSITIES.values())
    figures: Figures = {}
    for name, variant in _SPARSITIES.items():
        found = _profiled(steps[variant].step)
        where = f"{FAKE_RANKS} ranks sharded, {name}"
        figures[f"Python calls, {where}"] = found.total_calls
        figures[f"all-gathers, {where}"] = _num_calls(
            found, "deepspeed/comm/comm.py", "all_gather_into_tensor"
        )
    milliseconds = _least_milliseconds({name: entry.step for name, entry in steps.items()}, rounds)
    for name, variant in _SPARSITIES.items():
        figures[f"CPU ms, {FAKE_RANKS} ranks sharded, {name}"] = milliseconds[variant]
    return figures


def _launches(rounds: int) -> Figures:
    distributed.init_distributed()
    if distributed.device().type == "cuda":
        figures = _count_launches(_start(_inputs("bf16"), *_SPARSITIES.values()))
    elif importlib.util.find_spec("triton") is None:
        logger.warning("launches are not counted: they are those of the noise on GPUs; pip install triton")
        figures = {}
    else:
        figures = _launches_without_a_gpu(rounds)
    distributed.shut_down()
    return figures


def _launches_without_a_gpu(rounds: int) -> Figures:
    from lezo_ds.tools.benchmark.faked_triton import FakedTritonNoise  # CPUs often do not have Triton

    noise = FakedTritonNoise()
    with patch.object(select, "_backend_of", lambda _: noise), noise.with_norms():
        steps = _start(_inputs("bf16"), *_SPARSITIES.values())
        figures = _count_launches(steps)
        for name, variant in _SPARSITIES.items():
            spent = []
            for _ in range(rounds):
                before = noise.launch_seconds, noise.seconds
                steps[variant].step()
                spent.append((noise.launch_seconds - before[0], noise.seconds - before[1]))
            launches, everything = (1e3 * min(times) for times in zip(*spent, strict=True))
            figures[f"CPU ms, Triton's launches, driver faked, {name}"] = launches
            figures[f"CPU ms, with tables and views of copies, {name}"] = everything
    return figures


def _count_launches(steps: Mapping[str, Steps]) -> Figures:
    figures: Figures = {}
    for name, variant in _SPARSITIES.items():
        with Operators() as operators:
            steps[variant].step()
        found = _profiled(steps[variant].step)
        figures[f"torch launches, bf16, {name}"] = operators.count
        figures[f"Triton launches, bf16, {name}"] = _num_calls(found, "lezo_ds/noise/launch.py", "run")
    return figures


class _EqualShares(RandomInputs):
    """Random inputs whose micro-batches are all the same.

    The ranks of a fake group do not exist. They can agree only if each of them would have the same share.
    """

    def batches(self, step: int) -> list[MicroBatch]:
        """Return the same micro-batch for each rank."""
        micro_batches = super().batches(step)
        return micro_batches[:1] * len(micro_batches)


def _inputs(dtype: Dtype) -> RandomInputs:
    torch.set_num_threads(1)
    batch = 2 * distributed.world_size()
    return _EqualShares(replace(typical_setting(SHAPE, "sst2"), dtype=dtype, length=8, batch=batch))


def _start(inputs: RandomInputs, *variants: str) -> dict[str, Steps]:
    plain, engine = cache(inputs.plain_model), cache(inputs.start_engine)
    steps = {}
    for text in variants:
        steps[text] = start_steps(Variant.parse(text), inputs, plain=plain, engine=engine)
        for _ in range(WARM_UP_STEPS):
            steps[text].step()
    return steps


def _profiled(action: Callable[[], object]) -> Any:  # noqa: ANN401  # pstats.Stats, whose stub lacks total_calls
    profile = cProfile.Profile()
    profile.runcall(action)
    return pstats.Stats(profile)


def _num_calls(found: Any, file: str, function: str) -> int:  # noqa: ANN401
    return sum(
        calls
        for (path, _, name), (_, calls, *_) in found.stats.items()
        if name == function and Path(path).as_posix().endswith(file)
    )


def _least_milliseconds(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    least = dict.fromkeys(actions, float("inf"))
    for _ in range(rounds):
        for name, action in actions.items():
            start = time.thread_time()
            action()
            least[name] = min(least[name], 1e3 * (time.thread_time() - start))
    return least


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that launch a kernel on a GPU: not views, and not those that only take memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if not func.is_view and func.overloadpacket.__name__ not in _NO_KERNELS:
            self.count += 1
        return func(*args, **(kwargs or {}))
