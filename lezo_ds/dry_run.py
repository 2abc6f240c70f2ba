"""What a run would do, from all that can be known before weights load."""

from __future__ import annotations

from lezo_ds.checkpoint_files import DTYPES, build_on_meta, load_config, resolve_model
from lezo_ds.config import RunConfig, check_world, num_dropped
from lezo_ds.ds_config import load_ds_config
from lezo_ds.errors import HubError
from lezo_ds.layers import find_blocks
from lezo_ds.task_data import load_task_data


def describe_plan(config: RunConfig, world_size: int) -> str:
    """Check a config and return the plan of its run, a line a fact.

    What lies on the hub and cannot be reached is listed as not checked; a local path must be right.

    Args:
        config: of the run.
        world_size: number of ranks it would have.

    Raises:
        UserError: anything that is wrong and can be known now.
    """
    check_world(config, world_size)
    load_ds_config(config.deepspeed, config.model.dtype, world_size, config.train.micro_batch_size)
    num_micro_batches = config.train.batch_size // config.train.micro_batch_size
    lines = [
        f"run directory   {config.run_dir}",
        f"ranks           {world_size}, each with {num_micro_batches // world_size} of a step's "
        f"{num_micro_batches} micro-batches of {config.train.micro_batch_size} examples",
        f"steps           {config.train.steps}, evaluated every {config.train.eval_every}",
        f"optimiser       learning rate {config.zo.learning_rate:g}, perturbation scale "
        f"{config.zo.perturbation_scale:g}, {config.zo.forward} forward, "
        f"{config.zo.update_precision} updates",
    ]
    for check in (_model_lines, _data_lines):
        try:
            lines += check(config, world_size)
        except HubError as error:
            lines.append(f"not checked     {error}")
    return "\n".join(dict.fromkeys(lines))  # without the model, neither check comes to its end


def _model_lines(config: RunConfig, world_size: int) -> list[str]:
    dtype = DTYPES[config.model.dtype]
    model = build_on_meta(load_config(resolve_model(config.model.path)), dtype)
    layout = find_blocks(model)
    dropped = num_dropped(config.zo, layout.num_blocks)
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    low = 2 if config.zo.update_precision == "fp32_master" and dtype.itemsize == 2 else 0
    gib = 1 << 30
    return [
        f"model           {config.model.path}: {type(model).__name__}, {total:,} parameters, "
        f"{config.model.dtype}",
        f"blocks          {layout.num_blocks} in {layout.path}, {dropped} dropped a step",
        f"memory a rank   {total * (dtype.itemsize + low) / world_size / gib:.2f} GiB of shards and at most "
        f"{3 * largest * dtype.itemsize / gib:.2f} GiB for the largest module's copies, activations aside",
    ]


def _data_lines(config: RunConfig, world_size: int) -> list[str]:
    data = load_task_data(config)
    sizes = f"{len(data.train.encoded)} train, {len(data.dev.encoded)} dev, {len(data.test.encoded)} test"
    return [f"data            {data.task.name}, protocol {config.data.protocol}: {sizes}"]
