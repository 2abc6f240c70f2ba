"""The time of a run, measured on a model of the same shapes with two blocks of random weights.

All blocks of a model take the same time, so two of them are enough: one that steps drop and one
that they keep. From the seconds of a measured step,

    forward outside the blocks + in the dropped block + in the kept block + update

follow those of the real model with B blocks, D of which a step drops:

    forward outside + D x in the dropped block + (B - D) x in the kept block
        + update x (weights that a step of the real model updates) / (those of the measured step)

The measured step has one micro-batch for each rank, and on a CPU, whose time is in proportion to
its work, a few examples. The forward terms are multiplied by what the real step has more.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import DTYPES, build_on_meta, load_model_config
from lezo_ds.config import TRAINED, RunConfig
from lezo_ds.config.deepspeed import tensor_parallel_of
from lezo_ds.data.evaluation import evaluate
from lezo_ds.data.task_data import TaskData
from lezo_ds.engine import LezoEngine
from lezo_ds.runs.trainer import make_engine
from lezo_ds.tools.node_folder import folder_on_every_node
from lezo_ds.zo.layers import num_dropped

# How often an action is measured. The first time compiles kernels and is not counted, unless it
# takes so many seconds that no other follows.
_ROUNDS = 3
_MAX_SECONDS = 5.0
_FEW_EXAMPLES = 4
# These random numbers fill the weights again and again. Drawing new ones for all weights of a large
# model would take minutes.
_NUM_NOISE = 1 << 16


class _BlockClock:
    """Sums the seconds of a block's forward passes, with the gathering of its weights."""

    def __init__(self, block: nn.Module) -> None:
        self.seconds = 0.0
        # ZeRO-3 gathers a block in a pre-hook, too, so this one is the first.
        block.register_forward_pre_hook(self._start, prepend=True)
        block.register_forward_hook(self._stop)

    def _start(self, *_: object) -> None:
        self.seconds -= now()

    def _stop(self, *_: object) -> None:
        self.seconds += now()


def plan_time(
    config: RunConfig, directory: Path, data: TaskData, num_blocks: int
) -> tuple[float, float]:
    """Measure steps and scores on the ranks that are here. A collective.

    The plan may be for more ranks. Messages between the ranks here are included, and weights are
    not offloaded.

    Args:
        config: The run.
        directory: The folder of the run's model. Its weights are not read.
        data: The run's examples.
        num_blocks: Number of transformer blocks of the run's model.

    Returns:
        The seconds of a step (0 if the method does not train) and of scoring an example, if all
        work were done on the ranks here.
    """
    if distributed.rank() == 0:
        print("measuring parts of a step, for some seconds", file=sys.stderr, flush=True)
    measured = _measured_part(config)
    engine = _engine_of_two_blocks(measured, directory)
    blocks = engine.module.get_submodule(engine.layout.path).children()
    clocks = [_BlockClock(block) for block in blocks]
    batch_size = measured.train.eval_batch_size
    num_scored = min(len(data.dev.examples), batch_size * distributed.world_size())
    scored = replace(
        data.dev,
        examples=data.dev.examples[:num_scored],
        encoded=data.dev.encoded[:num_scored],
        prompts=data.dev.prompts[:num_scored],
    )
    outside, first, second = _fastest(clocks, lambda: evaluate(engine, data, scored, batch_size))
    # An evaluation drops no block.
    example = (outside + num_blocks * (first + second) / 2) / num_scored
    if config.method not in TRAINED:
        return 0.0, example

    # A generator, because a step of a run also draws its examples.
    batches = (data.step_batch(measured, step) for step in range(_ROUNDS))
    outside, dropped, kept = _fastest(clocks, lambda: engine.train_batch(next(batches), data.loss))
    # This applies the last step's record again and again. No block runs meanwhile.
    done = engine.global_steps

    def apply_last() -> None:
        engine.global_steps = done - 1
        engine.apply(done)

    update, _, _ = _fastest(clocks, apply_last)
    num_dropped_blocks = num_dropped(config.zo.sparsity or 0.0, num_blocks)
    num_kept_blocks = num_blocks - num_dropped_blocks
    # Trained elements of this rank: in the dropped block (0), in the kept one (1), and outside.
    num_trained: Counter[int] = Counter()
    for shard in engine.weights.shards:
        if shard.is_trained:
            num_trained[shard.named.block] += shard.count
    num_measured = num_trained.total() - num_trained[0]
    num_updated = num_measured + num_trained[1] * (num_kept_blocks - 1)
    forward = (outside - update) + num_dropped_blocks * dropped + num_kept_blocks * kept
    forward *= config.train.batch_size / measured.train.batch_size
    return forward + update * num_updated / num_measured, example


def _measured_part(config: RunConfig) -> RunConfig:
    """Return a run of smaller steps: one micro-batch for each rank here, if the ranks may."""
    train = config.train
    num_micro_batches = train.batch_size // train.micro_batch_size
    if num_micro_batches % distributed.world_size() == 0:
        num_micro_batches = distributed.world_size()
    size = train.micro_batch_size
    scored = train.eval_batch_size
    if distributed.device().type == "cpu":
        size = min(size, _FEW_EXAMPLES)
        scored = min(scored, _FEW_EXAMPLES)
    batch_size = num_micro_batches * size
    zo = config.zo
    if zo.examples_per_direction is not None:
        zo = replace(zo, examples_per_direction=math.gcd(zo.examples_per_direction, size))
    return replace(
        config,
        zo=zo,
        train=replace(train, batch_size=batch_size, micro_batch_size=size, eval_batch_size=scored),
    )


def _engine_of_two_blocks(config: RunConfig, directory: Path) -> LezoEngine:
    """Return an engine on a model with two blocks, the first of which steps drop. A collective."""
    world_size = distributed.world_size()

    def if_it_divides(size: int | None) -> int | None:
        """Return the size of groups of ranks, or None if the ranks here do not make such groups."""
        return size if size and world_size % size == 0 else None

    with folder_on_every_node(partial(_write_model, config, directory)) as folder:
        small = replace(
            config,
            model=replace(config.model, path=str(folder)),
            zo=replace(config.zo, sparsity=0.5, layer_policy="fixed", layer_policy_options={}),
            deepspeed=None,  # without offloading
            tensor_parallel=if_it_divides(tensor_parallel_of(config)),
            partition_size=if_it_divides(config.partition_size),
        )
        logging.disable(logging.INFO)
        try:
            return make_engine(small)
        finally:
            logging.disable(logging.NOTSET)


def _fastest(clocks: list[_BlockClock], action: Callable[[], object]) -> tuple[float, float, float]:
    """Repeat an action for some seconds, and return those of its fastest run. A collective.

    Returns:
        The seconds of everything but the forward passes of the blocks, of those of the first block,
        which steps drop, and of those of the second block, which steps perturb.
    """
    times: list[tuple[float, float, float]] = []
    begin = now()
    while len(times) < _ROUNDS:
        # The sum is the same on all ranks, and also a barrier.
        spent = torch.tensor([now() - begin], dtype=torch.float64, device=distributed.device())
        if distributed.sum_vector(spent)[0] > _MAX_SECONDS * distributed.world_size():
            break
        for clock in clocks:
            clock.seconds = 0.0
        start = now()
        action()
        total = now() - start
        first, second = [clock.seconds for clock in clocks]
        times.append((total - first - second, first, second))
    return min(times[1:] or times, key=sum)


def _write_model(config: RunConfig, source: Path, folder: Path) -> None:
    """Write a model of random weights: the shapes of the one in `source`, and two blocks."""
    shape: Any = load_model_config(source)
    decoder = shape.get_text_config()
    # Some architectures have lists with an entry for each block, such as layer_types.
    for key, value in list(vars(decoder).items()):
        has_entry_per_block = isinstance(value, list) and len(value) == decoder.num_hidden_layers
        if has_entry_per_block:
            setattr(decoder, key, value[:2])
    decoder.num_hidden_layers = 2
    shape.save_pretrained(folder)
    dtype = DTYPES[config.model.dtype]
    noise = 0.02 * torch.randn(_NUM_NOISE, dtype=dtype)
    weights = {}
    for name, parameter in build_on_meta(shape, dtype).named_parameters():
        repeated = noise.repeat(parameter.numel() // _NUM_NOISE + 1)
        weights[name] = repeated[: parameter.numel()].view(parameter.shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def now() -> float:
    """Return a clock in seconds, when the GPU has done what it was given."""
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
