"""What a run would do, from everything that can be known before its weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from lezo_ds import distributed
from lezo_ds.config import (
    TRAINED,
    ZEROTH_ORDER,
    RunConfig,
    check_world,
    make_layer_policy,
)
from lezo_ds.config.deepspeed import load_ds_config, warn_of_host_stalls, warn_of_idle_keys
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.errors import HubError
from lezo_ds.runs.trainer import check_monitors
from lezo_ds.sharding.checkpoint_files import resolve_model
from lezo_ds.tools.opt_shapes import SHAPES
from lezo_ds.tools.planning.inputs import InputSizes, assumed_inputs, measured_inputs
from lezo_ds.tools.planning.memory import rank_memory
from lezo_ds.tools.planning.model_sizes import ModelSizes, model_sizes

T = TypeVar("T")

_STEPS_COUNTED = 10
_MAX_SHOWN = 160
"""Characters of a text that are shown."""


def describe_plan(config: RunConfig, world_size: int) -> str:
    """Check a configuration and return the plan of its run, one line per fact.

    What is on the hub and cannot be reached is listed as not checked. A local path must be right.

    Args:
        config: configuration of the run.
        world_size: number of ranks it would have.

    Raises:
        UserError: anything that is wrong and can be known now.
    """
    check_monitors(config)
    micro_batch_size = config.train.micro_batch_size
    ds_config = load_ds_config(config.deepspeed, config.model.dtype, world_size, micro_batch_size)
    has_gradients = config.method == "adamw"
    if not has_gradients:
        warn_of_idle_keys(ds_config)
    if distributed.device().type != "cpu":
        warn_of_host_stalls(ds_config, has_gradients=has_gradients)
    trained: str = config.peft.kind if config.peft.kind != "none" else "all weights"
    if config.method in ZEROTH_ORDER and config.zo.only_blocks:
        trained += " of the blocks"
    lines = [
        ("run directory", config.run_dir),
        ("method", f"{config.method}, trains {trained if config.method in TRAINED else 'nothing'}"),
    ]
    if config.method in TRAINED:
        lines += _training_lines(config, world_size)
    unchecked: list[str] = []
    directory = _unless_on_hub(lambda: resolve_model(config.model.path), unchecked)
    data = _unless_on_hub(lambda: load_task_data(config), unchecked)
    if directory is not None or Path(config.model.path).name in SHAPES:
        model = model_sizes(config, directory)
        inputs = assumed_inputs(config, model) if data is None else measured_inputs(config, data)
        lines += [*_model_lines(config, model), *_memory_lines(config, model, inputs, world_size)]
    if data is not None:
        lines += _data_lines(config, data)
    lines += [("" if index else "not checked", text) for index, text in enumerate(unchecked)]
    return "\n".join(f"{heading:15} {text}" for heading, text in lines)


def _unless_on_hub(check: Callable[[], T], unchecked: list[str]) -> T | None:
    """Return the result of a check; None if the hub cannot be reached, which is noted once."""
    try:
        return check()
    except HubError as error:
        if str(error) not in unchecked:  # without the model, its tokenizer is missing too
            unchecked.append(str(error))
        return None


def _training_lines(config: RunConfig, world_size: int) -> list[tuple[str, str]]:
    check_world(config, world_size)
    train, zo = config.train, config.zo
    num_micro_batches = train.batch_size // train.micro_batch_size
    every = "every tenth of the run" if train.eval_every is None else f"every {train.eval_every}"
    if config.method == "adamw":
        optimizer = f"learning rate {config.adamw.learning_rate:g}, falling to 0"
    else:
        shape = "" if zo.lr_schedule == "constant" else f" ({zo.lr_schedule})"
        warmup = f" after {zo.warmup_steps} steps" if zo.warmup_steps else ""
        optimizer = (
            f"learning rate {zo.learning_rate:g}{shape}{warmup}, "
            f"perturbation scale {zo.perturbation_scale:g}, estimator {zo.estimator}, "
            f"{zo.probes_per_pass} probes in a pass, {zo.update_precision} updates"
        )
    share = f"{num_micro_batches // world_size} of a step's {num_micro_batches} micro-batches"
    return [
        ("ranks", f"{world_size}, each with {share} of {train.micro_batch_size} examples"),
        ("steps", f"{train.steps}, evaluated {every}"),
        ("optimizer", optimizer),
    ]


def _model_lines(config: RunConfig, model: ModelSizes) -> list[tuple[str, str]]:
    dropped = 0
    if config.method in ZEROTH_ORDER:
        policy = make_layer_policy(config.zo, model.num_blocks, trains_outside=model.trains_outside)
        dropped = policy.num_dropped
    size = f"{model.num_parameters:,} parameters"
    return [
        ("model", f"{config.model.path}: {model.class_name}, {size}, {config.model.dtype}"),
        ("blocks", f"{model.num_blocks} in {model.blocks_path}, {dropped} dropped per step"),
    ]


def _memory_lines(
    config: RunConfig, model: ModelSizes, inputs: InputSizes, world_size: int
) -> list[tuple[str, str]]:
    """Return the memory of a rank on a GPU, as lezo-ds plan gives it, and on CPUs if it would run here."""
    lines = [("inputs", f"at most {inputs.length} tokens ({inputs.source})")]
    on_gpu = rank_memory(config, model, inputs, world_size=world_size)
    lines.append(("memory a rank", f"on a GPU {on_gpu}"))
    if distributed.device().type == "cpu":
        on_cpu = rank_memory(config, model, inputs, world_size=world_size, on_gpu=False)
        lines.append(("", f"on CPUs, as here, {on_cpu}"))
    return lines


def _data_lines(config: RunConfig, data: TaskData) -> list[tuple[str, str]]:
    sizes = f"{len(data.train.encoded)} train, {len(data.dev.encoded)} dev, {len(data.test.encoded)} test"
    lines = [
        ("data", f"{data.task.name}, protocol {config.data.protocol}: {sizes}"),
        ("first example", _shown_example(data)),
    ]
    if config.method in TRAINED and not data.objective.reads_answers:
        tokens = f"{_tokens_per_example(config, data):.1f} per example, padding included"
        if data.packed:
            alone = _tokens_per_example(config, replace(data, packed=False))
            tokens += f"; {alone:.1f} if each had a row of its own"
        lines.append(("tokens", tokens))
    return lines


def _shown_example(data: TaskData) -> str:
    """Return the first training example as the model reads it, and the answer that it is trained on."""
    split, encoded = data.train, data.train.encoded[0]
    if not encoded.sequences:  # the record has no right answer
        return _quoted(data, split.prompts[0])
    candidate = encoded.label or 0
    sequence, targets = encoded.sequences[candidate], encoded.targets(candidate)
    start = encoded.spans[-1][0] if encoded.spans else targets[0]
    return f"{_quoted(data, sequence[:start])} -> {_quoted(data, sequence[start : targets[-1] + 1])}"


def _quoted(data: TaskData, ids: Sequence[int]) -> str:
    """Return the text of tokens, cut on the left, with line breaks and special tokens to be seen."""
    text: str = data.tokenizer.backend.decode(list(ids), clean_up_tokenization_spaces=False)
    start = "" if len(text) <= _MAX_SHOWN else "[...] "
    return start + json.dumps(text[-_MAX_SHOWN:], ensure_ascii=False)


def _tokens_per_example(config: RunConfig, data: TaskData) -> float:
    """Return how many tokens the model runs for an example in the first steps, on average."""
    batches = [batch for step in range(_STEPS_COUNTED) for batch in data.batch(config, step)]
    tokens = sum(batch.inputs["input_ids"].numel() for batch in batches)
    return tokens / (_STEPS_COUNTED * config.train.batch_size)
