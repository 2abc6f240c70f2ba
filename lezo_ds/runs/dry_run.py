"""What a run would do, from all that can be known before weights load."""

from __future__ import annotations

from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig, check_world, num_dropped
from lezo_ds.data.task_data import load_task_data
from lezo_ds.ds_config import load_ds_config
from lezo_ds.errors import HubError
from lezo_ds.model.checkpoint_files import DTYPES, build_on_meta, load_config, resolve_model
from lezo_ds.model.layers import find_blocks


def describe_plan(config: RunConfig, world_size: int) -> str:
    """Check a config and return the plan of its run, a line a fact.

    What lies on the hub and cannot be reached is listed as not checked; a local path must be right.

    Args:
        config: of the run.
        world_size: number of ranks it would have.

    Raises:
        UserError: anything that is wrong and can be known now.
    """
    load_ds_config(config.deepspeed, config.model.dtype, world_size, config.train.micro_batch_size)
    lines = [
        f"run directory   {config.run_dir}",
        f"method          {config.method}, tuned: {_tuned(config)}",
        *(_training_lines(config, world_size) if config.method in TRAINED else []),
    ]
    for check in (_model_lines, _data_lines):
        try:
            lines += check(config, world_size)
        except HubError as error:
            lines.append(f"not checked     {error}")
    return "\n".join(dict.fromkeys(lines))  # without the model, neither check comes to its end


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


def _bytes_a_parameter(config: RunConfig) -> int:
    """Return what a rank's shards hold for each parameter of the model; adapters and prefixes are small."""
    size = DTYPES[config.model.dtype].itemsize
    if config.method not in TRAINED or config.peft.kind != "none":
        return size
    if config.method == "adamw":
        # fp32: weights, gradients, two moments. 16 bit: weights, gradients, and fp32 weights and moments.
        return 16
    return size + (2 if config.zo.update_precision == "fp32_master" and size == 2 else 0)


def _model_lines(config: RunConfig, world_size: int) -> list[str]:
    dtype = DTYPES[config.model.dtype]
    model = build_on_meta(load_config(resolve_model(config.model.path)), dtype)
    layout = find_blocks(model)
    dropped = num_dropped(config.zo, layout.num_blocks) if config.method in ZEROTH_ORDER else 0
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    gib = 1 << 30
    shards = total * _bytes_a_parameter(config) / world_size / gib
    return [
        f"model           {config.model.path}: {type(model).__name__}, {total:,} parameters, "
        f"{config.model.dtype}",
        f"blocks          {layout.num_blocks} in {layout.path}, {dropped} dropped a step",
        f"memory a rank   {shards:.2f} GiB of shards and at most "
        f"{3 * largest * dtype.itemsize / gib:.2f} GiB for the largest module's copies, activations aside",
    ]


def _data_lines(config: RunConfig, world_size: int) -> list[str]:
    data = load_task_data(config)
    sizes = f"{len(data.train.encoded)} train, {len(data.dev.encoded)} dev, {len(data.test.encoded)} test"
    return [f"data            {data.task.name}, protocol {config.data.protocol}: {sizes}"]
