"""The time of a run, measured on a model of its shapes with two blocks of random weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from lezo_ds import distributed
from lezo_ds.config import TRAINED, RunConfig
from lezo_ds.config.deepspeed import tensor_parallel_of
from lezo_ds.data.evaluation import evaluate
from lezo_ds.data.task_data import TaskData
from lezo_ds.model.checkpoint import DTYPES, build_on_meta, load_model_config
from lezo_ds.runs.trainer import make_engine
from lezo_ds.zo.layers import num_dropped

_ROUNDS = 5  # the first compiles kernels and is not counted


def plan_time(
    config: RunConfig, directory: Path, data: TaskData, num_blocks: int
) -> tuple[float, float]:
    """Return the seconds of a step (0 without training) and of scoring an example, on the ranks here.

    A collective. Messages of these ranks are included. Weights are not offloaded.
    """
    world = distributed.world_size()  # the plan may be for more ranks
    sizes = dict[str, Any](
        tensor_parallel=tensor_parallel_of(config), partition_size=config.partition_size
    )
    sizes = {name: size if size and world % size == 0 else None for name, size in sizes.items()}
    # A step drops the first block, and keeps the last.
    zo = replace(config.zo, sparsity=0.5, layer_policy="fixed", layer_policy_options={})
    with ExitStack() as stack:
        folder = distributed.on_rank_zero(lambda: stack.enter_context(TemporaryDirectory()))
        distributed.on_rank_zero(lambda: _write_model(config, directory, Path(folder)))
        model = replace(config.model, path=folder)
        logging.disable(logging.INFO)
        stack.callback(logging.disable, logging.NOTSET)
        engine = make_engine(replace(config, model=model, zo=zo, deepspeed=None, **sizes))
        distributed.barrier()
    within: tuple[list[float], ...] = ([], [])
    for clock, block in zip(
        within, engine.module.get_submodule(engine.layout.path).children(), strict=True
    ):
        # The first hook comes before the one that gathers the block.
        block.register_forward_pre_hook(lambda *_, clock=clock: clock.append(-now()), prepend=True)
        block.register_forward_hook(lambda *_, clock=clock: clock.append(now()))

    def fastest(action: Callable[[], object]) -> list[float]:
        """Return the seconds outside the blocks, and in each of them."""
        times = []
        for _ in range(_ROUNDS):
            distributed.barrier()
            for clock in within:
                clock.clear()
            start = now()
            action()
            seconds, blocks = now() - start, [sum(clock) for clock in within]
            times.append([seconds - sum(blocks), *blocks])
        return min(times[1:], key=sum)

    batch = config.train.eval_batch_size
    count = min(len(data.dev.examples), 2 * batch * world)
    parts = ("examples", "encoded", "prompts", "null_encoded")
    some = replace(data.dev, **{name: getattr(data.dev, name)[:count] for name in parts})
    outside, *blocks = fastest(lambda: evaluate(engine, data, some, batch))
    example = (outside + num_blocks * sum(blocks) / 2) / count
    if config.method not in TRAINED:
        return 0.0, example
    steps = iter(data.step_batch(config, step) for step in range(_ROUNDS))
    outside, dropped, kept = fastest(lambda: engine.train_batch(next(steps), data.loss))
    update, _, _ = fastest(lambda: engine.apply(_ROUNDS - 1, _ROUNDS))
    numel = [0, 0, 0, 0]  # trained in the first block, in the last, and outside
    for parameter in engine.weights.parameters:
        numel[parameter.named.block] += parameter.parameter.requires_grad * parameter.count
    number = num_dropped(config.zo.sparsity or 0.0, num_blocks)
    updated = sum(numel[2:]) + numel[1] * (num_blocks - number)
    step = outside - update + number * dropped + (num_blocks - number) * kept
    return step + update * updated / sum(numel[1:]), example


def _write_model(config: RunConfig, source: Path, folder: Path) -> None:
    shape: Any = load_model_config(source)
    text = shape.get_text_config()
    for key, value in list(vars(text).items()):
        if (
            isinstance(value, list) and len(value) == text.num_hidden_layers
        ):  # an entry for each block
            setattr(text, key, value[:2])
    text.num_hidden_layers = 2
    shape.save_pretrained(folder)
    dtype = DTYPES[config.model.dtype]
    noise = 0.02 * torch.randn(1 << 16, dtype=dtype)
    tensors = {
        name: noise.repeat(p.numel() // len(noise) + 1)[: p.numel()].view(p.shape)
        for name, p in build_on_meta(shape, dtype).named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def now() -> float:
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
