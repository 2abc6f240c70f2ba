"""train --dry-run: checks a run, and shows its memory, disk and time.

The result is lines, one for each finding, such as

    model         opt-1.3b: OPTForCausalLM, 1,315,758,080 parameters, 1,315,758,080 trained, bf16
    blocks        24, 12 dropped per step
    disk          at most 3 snapshots of 5.26 GB at a time
    memory        of a rank, with inputs of at most 2048 tokens (assumed): 5.15 GiB: weights ...
    a GPU         of 24 GB has 22.5 GiB; ways that fit come first, and the fastest first
    a way         train.micro_batch_size=4 partition_size=1: 8.35 GiB a rank, receives 0 GB ...
    a way         train.micro_batch_size=8 tensor_parallel=2: 5.21 GiB a rank, receives 0.11 ...
    data          sst2, protocol clean: 1000 train, 500 dev, 872 test
    first example "</s>a gripping film It was great"
    time          about 0:42, besides loading, evaluations and snapshots: 10 steps of 0.41 s

Bad input raises the errors that a run would raise before it loads weights. A model or data on the
hub that cannot be reached from here is no error: a line says what is not checked. The time is that
of a few steps of the run itself, if this process group is that of the run and can hold the model.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import resolve_model
from lezo_ds.config import RunConfig, check_training, with_steps
from lezo_ds.config.deepspeed import check_shares, ds_config_of
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.errors import HubError, UserError
from lezo_ds.runs.records import with_start_date
from lezo_ds.runs.screen import duration
from lezo_ds.runs.trainer import check_run, make_engine
from lezo_ds.tools.memory_plan import GIB, Plan, memory_of_card
from lezo_ds.tools.sizes import OPT_SHAPES, InputSizes, ModelSizes, measured_inputs

_MAX_SHOWN = 160  # characters of the first example

# Tokens of the longest example, where the data cannot be read. An example has a quarter on average.
_TYPICAL_LENGTHS = {
    "sst2": 72,
    "copa": 32,
    "wic": 96,
    "wsc": 128,
    "rte": 288,
    "cb": 288,
    "record": 640,
    "boolq": 784,
    "multirc": 800,
    "squad": 896,
    "drop": 1024,
}

# Most steps that are measured, and seconds after which none follows.
_MEASURED_STEPS = 3
_ENOUGH_SECONDS = 5.0

LONG_STEP = 10.0
"""Seconds. If a step takes longer, a line says what would be faster."""
_FASTER = (
    "labels of one token each (a map in data.labels), fewer examples (train.batch_size), fewer "
    "directions (zo.directions), shorter texts (data.max_length), a smaller model, more ranks"
)


def dry_run(
    config: RunConfig,
    num_gpus: int | None = None,
    gpu_memory: float | None = None,
    step_seconds: float | None = None,
) -> Iterator[str]:
    """Check a configuration, and yield the lines that describe its run. A collective.

    Args:
        config: The run.
        num_gpus: Plan for so many GPUs with a rank on each. None plans for the ranks and devices
            of this process group.
        gpu_memory: Size of a GPU (see `memory_of_card`). The lines then say which settings fit it,
            also if this configuration does not run on so many GPUs.
        step_seconds: Of a step, if they are known.

    Raises:
        UserError: The run would be refused.
    """
    check_training(config)
    num_ranks = num_gpus or distributed.world_size()
    has_gpu = distributed.device().type != "cpu"
    on_gpu = has_gpu or num_gpus is not None or gpu_memory is not None
    is_refused = False
    try:
        check_shares(config, ds_config_of(config, num_ranks), num_ranks)
    except UserError as error:
        if gpu_memory is None:
            raise
        is_refused = True
        yield f"refused       {error}"
    directory: Path | None = None
    data: TaskData | None = None
    not_checked = ""
    try:
        directory = resolve_model(config.model.path)
        config = with_start_date(config)
        data = load_task_data(config)
        config = with_steps(config, len(data.train.examples))
        check_run(config, data)
    except HubError as error:
        not_checked = str(error)
    name = Path(config.model.path).name
    if directory is not None or name in OPT_SHAPES:
        plan = Plan(
            config, ModelSizes(config, directory or name), _inputs(config, data), num_ranks, on_gpu
        )
        yield from _model_lines(plan)
        assumed = "" if data is not None else " (assumed)"
        tokens = f"inputs of at most {plan.inputs.length} tokens{assumed}"
        terms = [f"{name} {size / GIB:.2f}" for name, size in plan.memory.items() if size]
        yield f"memory        of a rank, with {tokens}: {_needs(plan)}: {', '.join(terms)}"
        if num_ranks > 1 or gpu_memory is not None:
            yield from _ways(plan, gpu_memory)
    if not_checked:
        yield f"not checked   {not_checked}"
    if directory is not None and data is not None:
        yield from _data_lines(config, data)
        if not is_refused:
            yield from _time_lines(plan, data, step_seconds)


def _time_lines(plan: Plan, data: TaskData, step_seconds: float | None) -> Iterator[str]:
    """Yield the time of all steps, from that of one, which is measured if it is not known."""
    if step_seconds is None:
        step_seconds = measured_step(plan, data)
    if step_seconds is None:
        yield "time          not measured: for that, start the dry run as the run, where it fits"
        return
    num_steps = plan.config.train.steps or 0
    total = f"{duration(num_steps * step_seconds)}, besides loading, evaluations and snapshots"
    yield f"time          about {total}: {num_steps} steps of {step_seconds:.3g} s"
    if step_seconds > LONG_STEP:
        yield f"faster        {_FASTER}"


def measured_step(plan: Plan, data: TaskData) -> float | None:
    """Load a run's model, and return the seconds of its fastest step. A collective.

    Returns:
        None if the plan is not for the ranks that are here, or their memory cannot hold it.
    """
    num_ranks = distributed.world_size()
    on_gpu = distributed.device().type != "cpu"
    needed = plan.peak if on_gpu else plan.peak * num_ranks
    fits = needed <= distributed.on_rank_zero(distributed.free_memory)
    if not fits or plan.num_ranks != num_ranks or plan.on_gpu != on_gpu:
        return None
    if distributed.rank() == 0:
        print("measuring a few steps", file=sys.stderr, flush=True)
    engine = make_engine(plan.config)
    seconds: list[float] = []
    while len(seconds) < _MEASURED_STEPS and sum(seconds) < _ENOUGH_SECONDS:
        start = time.perf_counter()
        engine.train_batch(data.step_batch(plan.config, len(seconds)), data.loss)
        distributed.barrier()  # the GPUs have done their work, too
        seconds.append(distributed.broadcast_object(time.perf_counter() - start))
    return min(seconds)


def _inputs(config: RunConfig, data: TaskData | None) -> InputSizes:
    """Return the sizes of the inputs, or typical ones of the task if they cannot be read."""
    if data is not None:
        return measured_inputs(config, data)
    most = config.data.max_length
    length = min(most, _TYPICAL_LENGTHS.get(config.data.task, most))
    return InputSizes(length, mean_length=length / 4)


def _model_lines(plan: Plan) -> Iterator[str]:
    """Yield what is known of the model and of its snapshots."""
    config = plan.config
    model = plan.model
    kind = f"{config.model.path}: {model.class_name}, {model.num_parameters:,} parameters"
    yield f"model         {kind}, {model.num_trained:,} trained, {config.model.dtype}"
    yield f"blocks        {model.num_blocks}, {model.num_dropped} dropped per step"
    train = config.train
    number = 1 if train.snapshot_every == 0 else max(1, train.keep_snapshots) + 1
    yield f"disk          at most {number} snapshots of {plan.snapshot / 1e9:.3g} GB at a time"


def _ways(plan: Plan, gpu_memory: float | None) -> Iterator[str]:
    """Yield a line for each way to share the weights.

    If nothing fits, a first way offloads to the hosts' memory. Without the memory of a GPU,
    everything fits.
    """
    gpu_bytes = math.inf
    if gpu_memory is not None:
        gpu_bytes = memory_of_card(gpu_memory)
        has = f"of {gpu_memory:g} GB has {gpu_bytes / GIB:.1f} GiB"
        yield f"a GPU         {has}; ways that fit come first, and the fastest first"
    ways = plan.ways(gpu_bytes)
    if not any(way.fits(gpu_bytes) for way in ways):
        ways.insert(0, plan.offloaded(gpu_bytes))
    for way in ways:
        found = way.keys_from(plan.config).items()
        keys = [f"{key}={'null' if value is None else value}" for key, value in found]
        needs = f"{_needs(way)} a rank, receives {way.received() / 1e9:.3g} GB a step"
        if gpu_memory is not None:
            needs += ", fits" if way.fits(gpu_bytes) else ", does not fit"
        yield f"a way         {' '.join(keys)}: {needs}"


def _needs(plan: Plan) -> str:
    """Return the peak of a rank, and what it takes of its host."""
    of_host = f" and {plan.in_host / GIB:.2f} GiB of the host's memory" if plan.in_host else ""
    return f"{plan.peak / GIB:.2f} GiB{of_host}"


def _data_lines(config: RunConfig, data: TaskData) -> Iterator[str]:
    """Yield the sizes of the splits, and the end of the first training example.

    The example has the answer that it is trained on.
    """
    splits = {"train": data.train, "dev": data.dev, "test": data.test}
    sizes = ", ".join(f"{len(split.encoded)} {name}" for name, split in splits.items())
    yield f"data          {data.task.name}, protocol {config.data.protocol}: {sizes}"
    encoded = data.train.encoded[0]
    # A record without a right answer has no sequence, only a prompt.
    ids = encoded.sequences[encoded.label or 0] if encoded.sequences else data.train.prompts[0]
    text: str = data.tokenizer.backend.decode(list(ids), clean_up_tokenization_spaces=False)
    # JSON shows line breaks and spaces at the ends.
    yield f"first example {json.dumps(text[-_MAX_SHOWN:], ensure_ascii=False)}"
