"""train --dry-run: all that can be checked before weights are loaded; memory, disk and time of the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig, eval_every, num_passes
from lezo_ds.config.deepspeed import check_shares, ds_config_of, tensor_parallel_of
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.errors import HubError
from lezo_ds.runs.disk import check_disk, snapshot_sizes
from lezo_ds.runs.screen import duration
from lezo_ds.runs.trainer import check_run
from lezo_ds.tools import memory_plan as plan
from lezo_ds.tools.time_plan import plan_time

T = TypeVar("T")
Line = tuple[str, str]

_MAX_SHOWN = 160
_OFFLOAD = "zero3_cpu_offload"


def dry_run(config: RunConfig, num_gpus: int | None = None, gpu_memory: float | None = None) -> str:
    """Check a configuration and return the facts of its run, one per line, and what fits GPUs of some GiB.

    The plan is for `num_gpus` GPUs with one rank on each; None plans for the ranks and devices of this
    process group. What is on the hub and cannot be reached is listed as not checked.
    """
    world_size = num_gpus or distributed.world_size()
    on_gpu = num_gpus is not None or distributed.device().type != "cpu"
    check_shares(config, ds_config_of(config, world_size), world_size)
    lines: list[Line] = [("run directory", config.run_dir), ("method", config.method)]
    if config.method in TRAINED:
        train = config.train
        share = f"{train.batch_size // train.micro_batch_size} micro-batches of {train.micro_batch_size}"
        lines.append(("a step", f"{share} examples, on {world_size} ranks; {train.steps} steps"))
    not_checked: dict[str, None] = {}
    directory = _unless_on_hub(lambda: resolve_model(config.model.path), not_checked)
    data = _unless_on_hub(lambda: load_task_data(config), not_checked)
    name = Path(config.model.path).name
    if directory is not None and data is not None:
        check_run(config, data, world_size)
    if directory is not None or name in plan.OPT_SHAPES:
        model = plan.model_sizes(config, directory or name)
        longest = min(config.data.max_length, model.max_length or config.data.max_length)
        inputs = plan.InputSizes(longest) if data is None else plan.measured_inputs(config, data)
        size = f"{model.num_parameters:,} parameters, {model.num_trained:,} trained, {config.model.dtype}"
        blocks = f"{model.num_blocks} in {model.blocks_path}, {model.num_dropped} dropped per step"
        lines += [("model", f"{config.model.path}: {model.class_name}, {size}"), ("blocks", blocks)]
        if config.method != "adamw":
            memory = plan.rank_memory(config, model, inputs, world_size=world_size, on_gpu=on_gpu)
            assumed = "" if data else " (assumed)"
            text = f"of a rank, with inputs of at most {inputs.length} tokens{assumed}: {memory}"
            lines += [
                ("memory", text),
                *_ways_lines(config, model, inputs, world_size, on_gpu=on_gpu),
            ]
            if gpu_memory is not None:
                lines += what_fits(config, model, inputs, world_size, int(gpu_memory * plan.GIB))
        if disk := snapshot_sizes(config, model.num_parameters, model.num_trained):
            parts = [f"{disk.count(file)} of {file / 1e9:.3g} GB" for file in dict.fromkeys(disk)]
            text = f"{sum(disk) / 1e9:.3g} GB: snapshots, {' and '.join(parts)}, that being written included"
            lines.append(("disk", text))
        if num_gpus is None:  # another plan may be for another machine
            check_disk(config, model.num_parameters, model.num_trained)
        if data is not None and directory is not None:
            lines.append(("time", _time_text(config, model, directory, data, world_size, on_gpu)))
    if data is not None:
        sizes = ", ".join(
            f"{len(getattr(data, name).encoded)} {name}" for name in ("train", "dev", "test")
        )
        lines.append(("data", f"{data.task.name}, protocol {config.data.protocol}: {sizes}"))
        lines.append(("first example", _shown_example(data)))
    lines += [("not checked", text) for text in not_checked]
    return "\n".join(f"{heading:13} {text}" for heading, text in lines)


def _ways_lines(
    config: RunConfig,
    model: plan.ModelSizes,
    inputs: plan.InputSizes,
    num_ranks: int,
    *,
    on_gpu: bool,
) -> list[Line]:
    """Say what a rank receives in a step, and holds, under ZeRO-3 and under tensor parallelism."""
    if config.method not in ZEROTH_ORDER or num_ranks == 1:
        return []
    asked, texts, received = tensor_parallel_of(config), [], list[float]()
    split = asked if asked > 1 else num_ranks
    for size in (1, split) if model.heads % split == 0 else (1,):
        way = replace(config, tensor_parallel=size, partition_size=None, deepspeed=None)
        held = (
            plan.rank_memory(way, model, inputs, world_size=num_ranks, on_gpu=on_gpu).total
            / plan.GIB
        )
        received.append(plan.received_bytes(way, model, inputs, ranks=num_ranks, split=size) / 1e9)
        name = f"tensor_parallel={size}" if size > 1 else "ZeRO-3"
        texts.append(f"{name} {received[-1]:.3g} GB a step, {held:.3g} GiB")
    if len(received) > 1:
        length = (inputs.mean_length or inputs.length) * received[0] / received[1]
        texts.append(f"ZeRO-3 receives less from {length:.3g} tokens an example on")
    return [("a rank", f"receives and holds: {'; '.join(texts)}")]


def what_fits(
    config: RunConfig,
    model: plan.ModelSizes,
    inputs: plan.InputSizes,
    num_ranks: int,
    gpu_bytes: int,
) -> list[Line]:
    """Return a line for each way to share the weights, with the largest micro-batch that fits a GPU.

    The weights are sharded by ZeRO-3, and offloaded to the hosts' memory only if nothing fits otherwise.
    """
    batch, texts, fits = config.train.batch_size, [], list[bool]()
    zero3 = config.deepspeed if tensor_parallel_of(config) == 1 else None
    ways = [(size, zero3) for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for shards, source in [*ways, (num_ranks, _OFFLOAD)]:
        if len(fits) == len(ways) and any(fits):
            break
        for size in (size for size in range(batch, 0, -1) if batch % size == 0):
            train = replace(config.train, micro_batch_size=size, eval_batch_size=size)
            way = replace(
                config, tensor_parallel=None, partition_size=shards, deepspeed=source, train=train
            )
            if config.method in TRAINED and num_passes(way) % num_ranks and size > 1:
                continue
            memory = plan.rank_memory(way, model, inputs, world_size=num_ranks)
            if memory.total <= gpu_bytes:
                break
        fits.append(memory.total <= gpu_bytes)
        keys = f"partition_size={shards} train.micro_batch_size={size}"
        keys += f" deepspeed={_OFFLOAD}" if memory.host else ""
        host = f", {memory.host / plan.GIB:.2f} of the host's memory" if memory.host else ""
        verdict = "fits" if fits[-1] else "does not fit"
        texts.append(f"{keys}: {memory.total / plan.GIB:.2f} GiB a rank{host}, {verdict}")
    return [("" if index else "what fits", text) for index, text in enumerate(texts)]


def _time_text(
    config: RunConfig,
    model: plan.ModelSizes,
    directory: Path,
    data: TaskData,
    num_ranks: int,
    on_gpu: bool,
) -> str:
    if on_gpu != (distributed.device().type != "cpu") or config.method == "adamw":
        return "not estimated: run this where such GPUs are, with a method other than adamw"
    here = distributed.world_size()
    step, example = (
        t * here / num_ranks for t in plan_time(config, directory, data, model.num_blocks)
    )
    dev, test = example * len(data.dev.examples), example * len(data.test.examples)
    how = f"estimated from two blocks of random weights on {here} of {num_ranks} ranks"
    how += ", without their messages" if here == 1 < num_ranks else ""
    if not step:
        return f"about {duration(test)} to score the test examples; {how}"
    steps = config.train.steps or 0
    number = 1 - (-steps // eval_every(config))  # one before the first step
    total = duration(steps * step + number * dev + 2 * test)
    text = f"{steps} steps of {step:.3g} s, {number} validations of {duration(dev)}, 2 tests of"
    return f"about {total}, besides loading and snapshots: {text} {duration(test)}; {how}"


def _unless_on_hub(check: Callable[[], T], not_checked: dict[str, None]) -> T | None:
    try:
        return check()
    except HubError as error:
        not_checked[str(error)] = None  # once: without the model, its tokenizer is missing too
        return None


def _shown_example(data: TaskData) -> str:
    """Return the first training example as the model reads it, with the answer that it is trained on."""
    split, encoded = data.train, data.train.encoded[0]
    # A record without a gold label has no sequence.
    ids = encoded.sequences[encoded.label or 0] if encoded.sequences else split.prompts[0]
    text: str = data.tokenizer.backend.decode(list(ids), clean_up_tokenization_spaces=False)
    start = "" if len(text) <= _MAX_SHOWN else "[...] "
    return start + json.dumps(text[-_MAX_SHOWN:], ensure_ascii=False)
