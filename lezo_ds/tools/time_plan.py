"""The time of a run, measured on a model of the same shapes with two blocks of random weights.

All blocks of a model take the same time, so two of them are enough: one that steps drop and one
that they keep. From the seconds of a measured step,

    forward outside the blocks + in the dropped block + in the kept block + update

follow those of the real model with B blocks, D of which a step drops:

    forward outside + D x in the dropped block + (B - D) x in the kept block
        + update x (weights that a step of the real model updates) / (those of the measured step)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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

# How often an action is measured. The first time compiles kernels and is not counted.
_ROUNDS = 5
# These random numbers fill the weights again and again. Drawing new ones for all weights of a large
# model would take minutes.
_NUM_NOISE = 1 << 16


class PlannedSeconds(NamedTuple):
    """The times that a run is made of.

    Attributes:
        step: Seconds of a training step; 0 if the method does not train.
        example: Seconds of scoring one example.
    """

    step: float
    example: float


class _Seconds(NamedTuple):
    """What an action of the model with two blocks took.

    Attributes:
        outside: Everything but the forward passes of the blocks.
        dropped: Forward passes of the first block, which steps drop.
        kept: Forward passes of the second block, which steps perturb.
    """

    outside: float
    dropped: float
    kept: float


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
) -> PlannedSeconds:
    """Measure steps and scores on the ranks that are here. A collective.

    The plan may be for more ranks. Messages between the ranks here are included, and weights are
    not offloaded.

    Args:
        config: The run.
        directory: The folder of the run's model. Its weights are not read.
        data: The run's examples.
        num_blocks: Number of transformer blocks of the run's model.

    Returns:
        The seconds of a step and of scoring an example, if all work were done on the ranks here.
    """
    engine = _engine_of_two_blocks(config, directory)
    blocks = engine.module.get_submodule(engine.layout.path).children()
    clocks = [_BlockClock(block) for block in blocks]
    batch_size = config.train.eval_batch_size
    # Two batches for each rank are enough.
    num_scored = min(len(data.dev.examples), 2 * batch_size * distributed.world_size())
    scored = replace(
        data.dev,
        examples=data.dev.examples[:num_scored],
        encoded=data.dev.encoded[:num_scored],
        prompts=data.dev.prompts[:num_scored],
    )
    scoring = _fastest(clocks, lambda: evaluate(engine, data, scored, batch_size))
    block_seconds = (scoring.dropped + scoring.kept) / 2  # an evaluation drops no block
    example = (scoring.outside + num_blocks * block_seconds) / num_scored
    if config.method not in TRAINED:
        return PlannedSeconds(0.0, example)

    # A generator, because a step of a run also draws its examples.
    batches = (data.step_batch(config, step) for step in range(_ROUNDS))
    step = _fastest(clocks, lambda: engine.train_batch(next(batches), data.loss))
    # This applies the last step's record again and again. No block runs meanwhile.
    update = _fastest(clocks, lambda: engine.apply(_ROUNDS - 1, _ROUNDS)).outside
    dropped_blocks = num_dropped(config.zo.sparsity or 0.0, num_blocks)
    kept_blocks = num_blocks - dropped_blocks
    outside_weights, kept_weights = _num_updated(engine)
    measured_weights = outside_weights + kept_weights
    updated_weights = outside_weights + kept_weights * kept_blocks
    seconds = (
        (step.outside - update)
        + dropped_blocks * step.dropped
        + kept_blocks * step.kept
        + update * updated_weights / measured_weights
    )
    return PlannedSeconds(seconds, example)


def _engine_of_two_blocks(config: RunConfig, directory: Path) -> LezoEngine:
    """Return an engine on a model with two blocks, the first of which steps drop. A collective."""
    world_size = distributed.world_size()

    def if_it_divides(size: int | None) -> int | None:
        """Return the size of groups of ranks, or None if the ranks here do not make such groups."""
        return size if size and world_size % size == 0 else None

    zo = replace(config.zo, sparsity=0.5, layer_policy="fixed", layer_policy_options={})
    with ExitStack() as stack:
        folder = stack.enter_context(
            folder_on_every_node(lambda folder: _write_model(config, directory, folder))
        )
        logging.disable(logging.INFO)
        stack.callback(logging.disable, logging.NOTSET)
        small = replace(
            config,
            model=replace(config.model, path=str(folder)),
            zo=zo,
            deepspeed=None,  # without offloading
            tensor_parallel=if_it_divides(tensor_parallel_of(config)),
            partition_size=if_it_divides(config.partition_size),
        )
        return make_engine(small)


def _fastest(clocks: list[_BlockClock], action: Callable[[], object]) -> _Seconds:
    """Repeat an action; return what its fastest repetition took. A collective."""
    times = []
    for _ in range(_ROUNDS):
        distributed.barrier()
        for clock in clocks:
            clock.seconds = 0.0
        start = now()
        action()
        total = now() - start
        dropped, kept = [clock.seconds for clock in clocks]
        times.append(_Seconds(total - dropped - kept, dropped, kept))
    return min(times[1:], key=sum)


def _num_updated(engine: LezoEngine) -> tuple[int, int]:
    """Return the elements that a step updates on this rank: outside the blocks, in the kept one."""
    num_trained = [0, 0, 0, 0]  # of the dropped block, the kept one, embeddings, and the rest
    for shard in engine.weights.shards:
        if shard.is_trained:
            num_trained[shard.named.block] += shard.count
    _, kept, embeddings, rest = num_trained
    return embeddings + rest, kept


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
