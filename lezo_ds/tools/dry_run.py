"""train --dry-run: checks a run, and shows its memory, disk and time.

The result is lines, one for each finding, such as

    model         opt-1.3b: OPTForCausalLM, 1,315,758,080 parameters, 1,315,758,080 trained, bf16
    blocks        24, of which a step perturbs 12
    disk          at most 3 snapshots of 5.26 GB at a time, besides exports
    memory        of a rank, with inputs of at most 2048 tokens: 5.15 GiB: weights ...
    a GPU         of 24 GB has 22.1 GiB or more: the run fits
    a way         partition_size=1: 8.35 GiB a rank
    a way         tensor_parallel=2 partition_size=null: 5.21 GiB a rank
    data          sst2, protocol clean: 1000 train, 500 dev, 872 test
    reads  '</s>a gripping film It was great'
    learns  [' great'] label 1
    time          about 0:42, besides loading, evaluations and snapshots: 10 steps of 0.41 s

Bad input raises the errors that a run would raise before it loads weights. Data on the Hub that
cannot be reached are no error: a line says what is not checked, and inputs are assumed to be as
long as they may be. The memory is that of the formula in memory_plan.py. The time is that of a step
of the run itself, if this process group is that of the run and can hold the model.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator

from lezo_ds import distributed
from lezo_ds.config import RunConfig, with_steps
from lezo_ds.config.deepspeed import check_shares, ds_config_of
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.errors import HubError
from lezo_ds.runs.cross_check import cross_check
from lezo_ds.runs.records import with_start_date
from lezo_ds.runs.screen import duration
from lezo_ds.runs.trainer import check_run, make_engine
from lezo_ds.tools.examples import example_lines
from lezo_ds.tools.memory_plan import (
    GIB,
    USABLE,
    InputSizes,
    ModelSizes,
    measured_inputs,
    memory_of,
    ways,
)

logger = logging.getLogger(__name__)


def dry_run(
    config: RunConfig, num_gpus: int | None = None, gpu_memory: float | None = None
) -> Iterator[str]:
    """Check a configuration, and yield the lines that describe its run. A collective.

    Args:
        config: The run.
        num_gpus: Plan for so many GPUs with a rank on each. None plans for the ranks and devices
            of this process group.
        gpu_memory: Gigabytes that a GPU is sold with. The lines then say which settings fit it,
            also if this configuration does not run on so many GPUs.

    Raises:
        UserError: The run would be refused. The lines of its memory come first.
    """
    num_ranks = num_gpus or distributed.world_size()
    is_here = num_gpus is None and gpu_memory is None
    on_gpu = distributed.device().type != "cpu" or not is_here
    data: TaskData | None = None
    inputs = InputSizes(config.data.max_length)
    try:
        config = with_start_date(config)
        data = load_task_data(config)
        inputs = measured_inputs(config, data)
        config = with_steps(config, len(data.train))
        check_run(config, data)
    except HubError as error:
        yield f"not checked   {error}"
    model = ModelSizes(config)
    yield from _model_lines(config, model)
    memory = memory_of(config, model, inputs, num_ranks, on_gpu=on_gpu)
    needed = sum(memory.values())
    terms = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.items())
    tokens = f"inputs of at most {inputs.length} tokens"
    yield f"memory        of a rank, with {tokens}: {needed / GIB:.2f} GiB: {terms}"
    gpu_bytes = math.inf
    if gpu_memory is not None:
        gpu_bytes = USABLE * GIB * gpu_memory
        fits = "the run fits" if needed <= gpu_bytes else "the run does not fit"
        yield f"a GPU         of {gpu_memory:g} GB has {gpu_bytes / GIB:.1f} GiB or more: {fits}"
    if not is_here:
        for keys, size in ways(config, model, inputs, num_ranks, gpu_bytes):
            yield f"a way         {keys}: {size / GIB:.2f} GiB a rank"
    check_shares(config, ds_config_of(config, num_ranks), num_ranks)
    if data is not None:
        splits = f"{len(data.train)} train, {len(data.dev)} dev, {len(data.test)} test"
        yield f"data          {data.task.name}, protocol {config.data.protocol}: {splits}"
        yield from example_lines(data, 1)
        yield from time_lines(config, measured_step(config, data, needed) if is_here else None)


def measured_step(
    config: RunConfig, data: TaskData, needed: float, num_steps: int = 2
) -> float | None:
    """Load a run's model on its ranks, and return the seconds of a step. A collective.

    Args:
        config: The run.
        data: Its examples.
        needed: The bytes that a rank needs.
        num_steps: Number of steps. The last one counts: the first one may compile kernels.

    Returns:
        None if the ranks have not so much memory.
    """
    if distributed.device().type == "cpu":  # the ranks share it
        needed *= distributed.world_size()
    if needed > distributed.on_rank_zero(distributed.free_memory):
        return None
    logger.info("measuring a step")
    engine = make_engine(config)
    cross_check(engine, data, config, data.step_rows(config, 0))
    seconds = 0.0
    for step in range(num_steps):
        start = time.perf_counter()
        engine.train_batch(data.step_batch(config, step), data.loss)
        distributed.barrier()  # the GPUs have done their work, too
        seconds = distributed.broadcast_object(time.perf_counter() - start)
    return seconds


def _model_lines(config: RunConfig, model: ModelSizes) -> Iterator[str]:
    """Yield the model, and its snapshots on the disk."""
    kind = f"{config.model.path}: {model.class_name}, {model.num_parameters:,} parameters"
    yield f"model         {kind}, {model.num_trained:,} trained, {config.model.dtype}"
    yield f"blocks        {model.num_blocks}, of which a step perturbs {model.num_kept}"
    number = 1
    if config.train.snapshot_every != 0:
        number += max(1, config.train.keep_snapshots)
    size = f"{model.snapshot / 1e9:.3g} GB"
    yield f"disk          at most {number} snapshots of {size} at a time, besides exports"


def time_lines(config: RunConfig, step_seconds: float | None) -> Iterator[str]:
    """Yield the time of all steps, from that of one."""
    if step_seconds is None:
        yield "time          not measured: for that, start the dry run as the run, where it fits"
        return
    num_steps = config.train.steps or 0
    total = f"{duration(num_steps * step_seconds)}, besides loading, evaluations and snapshots"
    yield f"time          about {total}: {num_steps} steps of {step_seconds:.3g} s"
