"""What a run would do, from all that can be known before weights load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from lezo_ds import distributed
from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig, check_world, num_dropped
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.ds_config import load_ds_config
from lezo_ds.errors import HubError
from lezo_ds.sharding.checkpoint_files import load_config, resolve_model
from lezo_ds.tools.planning.known_models import published_config
from lezo_ds.tools.planning.memory import CPU_RESERVE, GPU_RESERVE
from lezo_ds.tools.planning.model_facts import ModelFacts, model_facts
from lezo_ds.tools.planning.run_memory import data_inputs, run_memory, typical_inputs

T = TypeVar("T")

_GIB = 1 << 30
_STEPS_COUNTED = 10


def describe_plan(config: RunConfig, world_size: int) -> str:
    """Check a config and return the plan of its run, a line a fact.

    What lies on the hub and cannot be reached is listed as not checked; a local path must be right.

    Args:
        config: of the run.
        world_size: number of ranks it would have.

    Raises:
        UserError: anything that is wrong and can be known now.
    """
    micro_batch_size = config.train.micro_batch_size
    load_ds_config(config.deepspeed, config.model.dtype, world_size, micro_batch_size)
    lines = [
        f"run directory   {config.run_dir}",
        f"method          {config.method}, tuned: {_tuned(config)}",
        *(_training_lines(config, world_size) if config.method in TRAINED else []),
    ]
    unchecked: list[str] = []
    facts = _unless_on_hub(lambda: _model_facts(config), unchecked)
    data = _unless_on_hub(lambda: load_task_data(config), unchecked)
    if facts is None and (known := published_config(config.model.path)) is not None:
        facts = _facts_of(config, known)
    if facts is not None:
        lines += [*_model_lines(config, facts), _memory_line(config, facts, data, world_size)]
    if data is not None:
        lines.append(_data_line(config, data))
        if config.method in TRAINED and not data.objective.reads_answers:
            lines.append(_tokens_line(config, data))
    headings = ["not checked", *[""] * len(unchecked)]
    lines += [f"{heading:15} {text}" for heading, text in zip(headings, unchecked, strict=False)]
    return "\n".join(lines)


def _unless_on_hub(check: Callable[[], T], unchecked: list[str]) -> T | None:
    """Return what is found, or None if it cannot be reached, and say so once."""
    try:
        return check()
    except HubError as error:
        if str(error) not in unchecked:  # without the model, its tokenizer is not there either
            unchecked.append(str(error))
        return None


def _tuned(config: RunConfig) -> str:
    if config.method not in TRAINED:
        return "nothing"
    return "all weights" if config.peft.kind == "none" else config.peft.kind


def _training_lines(config: RunConfig, world_size: int) -> list[str]:
    check_world(config, world_size)
    train, zo = config.train, config.zo
    num_micro_batches = train.batch_size // train.micro_batch_size
    steps = f"{config.adamw.epochs} epochs" if train.steps is None else str(train.steps)
    every = "every tenth of the run" if train.eval_every is None else f"every {train.eval_every}"
    if config.method == "adamw":
        optimiser = f"learning rate {config.adamw.learning_rate:g}, falling to 0"
    else:
        optimiser = (
            f"learning rate {zo.learning_rate:g}, perturbation scale {zo.perturbation_scale:g}, "
            f"{zo.forward} forward, {zo.update_precision} updates"
        )
    return [
        f"ranks           {world_size}, each with {num_micro_batches // world_size} of a step's "
        f"{num_micro_batches} micro-batches of {train.micro_batch_size} examples",
        f"steps           {steps}, evaluated {every}",
        f"optimiser       {optimiser}",
    ]


def _model_facts(config: RunConfig) -> ModelFacts:
    return _facts_of(config, load_config(resolve_model(config.model.path)))


def _facts_of(config: RunConfig, transformers_config: object) -> ModelFacts:
    peft = config.peft if config.method in TRAINED else None
    return model_facts(transformers_config, config.model.dtype, peft)


def _model_lines(config: RunConfig, facts: ModelFacts) -> list[str]:
    dropped = num_dropped(config.zo, facts.num_blocks) if config.method in ZEROTH_ORDER else 0
    return [
        f"model           {config.model.path}: {facts.name}, {facts.num_parameters:,} parameters, "
        f"{config.model.dtype}",
        f"blocks          {facts.num_blocks} in {facts.blocks_path}, {dropped} dropped a step",
    ]


def _memory_line(config: RunConfig, facts: ModelFacts, data: TaskData | None, world_size: int) -> str:
    """Return the memory of a rank, for its longest inputs; without data, for as long as may be expected."""
    on_cpu = distributed.device().type == "cpu"
    memory = run_memory(
        config,
        facts,
        world_size,
        typical_inputs(config, facts, None) if data is None else data_inputs(config, data),
        on_cpu=on_cpu,
        reserve=CPU_RESERVE if on_cpu else GPU_RESERVE,
    )
    shards = memory.weights + memory.low_bits + memory.optimizer
    beside = {
        "buckets of gradients": memory.buckets,
        "AdamW's step": memory.update,
        "loading": memory.loading,
        "gathered": memory.gathered,
        "perturbed copies": memory.copies,
        "activations": memory.activations,
        "logits": memory.logits,
        "no tensors": memory.reserve,
    }
    parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in beside.items() if size)
    elsewhere = {"its host": memory.host, "its disk": memory.disk}
    rest = "".join(f", and {size / _GIB:.2f} of {where}" for where, size in elsewhere.items() if size)
    return (
        f"memory a rank   {shards / _GIB:.2f} GiB of shards; {parts}; {memory.total / _GIB:.2f} in all{rest}"
    )


def _data_line(config: RunConfig, data: TaskData) -> str:
    sizes = f"{len(data.train.encoded)} train, {len(data.dev.encoded)} dev, {len(data.test.encoded)} test"
    return f"data            {data.task.name}, protocol {config.data.protocol}: {sizes}"


def _tokens_line(config: RunConfig, data: TaskData) -> str:
    """Return what the first steps give the model, padding included, as laid out and with nothing packed."""

    def mean(data: TaskData) -> float:
        steps = range(_STEPS_COUNTED)
        fed = sum(batch.inputs["input_ids"].numel() for step in steps for batch in data.batch(config, step))
        return fed / (_STEPS_COUNTED * config.train.batch_size)

    packed = f"{mean(data):.1f} an example, with padding"
    padded = f"; {mean(replace(data, packed=False)):.1f} in rows of their own" if data.packed else ""
    return f"tokens          {packed}{padded}"
