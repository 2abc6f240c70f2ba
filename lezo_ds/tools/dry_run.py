"""train --dry-run: checks all that needs no weights; shows memory, disk and time of the run.

The result is a text with a line for each finding, such as

    run directory runs/first
    method        lezo
    a step        4 micro-batches of 4 examples, on 4 ranks; 10 steps
    model         opt-1.3b: OPTForCausalLM, 1,315,758,080 parameters, 1,315,758,080 trained, bf16
    blocks        24 in model.decoder.layers, 12 dropped per step
    memory        of a rank, with inputs of at most 2048 tokens (assumed): 5.15 GiB: ...
    a rank        receives and holds: ZeRO-3 1.97 GB a step, 5.15 GiB; tensor_parallel=4 ...
    what fits     partition_size=1 train.micro_batch_size=4: 8.35 GiB a rank, fits
                  partition_size=2 train.micro_batch_size=4: 6.37 GiB a rank, fits
    disk          15.8 GB: snapshots, 3 of 5.26 GB, that being written included
    time          about 0:42, besides loading and snapshots: 10 steps of 0.41 s, ...
    data          sst2, protocol clean: 1000 train, 500 dev, 872 test
    first example "</s>a gripping film It was great"

Bad input raises the errors that a run would raise before it loads weights. A model or data on the
hub that cannot be reached from here is no error: the text lists it as not checked.
"""

from __future__ import annotations

import json
import math
from collections import Counter
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
from lezo_ds.runs.disk import snapshot_sizes
from lezo_ds.runs.screen import duration
from lezo_ds.runs.trainer import check_run
from lezo_ds.tools.memory_plan import GIB, RankMemory, rank_memory, received_bytes
from lezo_ds.tools.sizes import OPT_SHAPES, InputSizes, ModelSizes, measured_inputs, model_sizes
from lezo_ds.tools.time_plan import plan_time

T = TypeVar("T")
Line = tuple[str, str]  # a heading and what was found

_MAX_SHOWN = 160  # characters of the first example
_OFFLOAD = "zero3_cpu_offload"


def dry_run(config: RunConfig, num_gpus: int | None = None, gpu_memory: float | None = None) -> str:
    """Check a configuration, and describe its run. A collective.

    Args:
        config: The run.
        num_gpus: Plan for so many GPUs with a rank on each. None plans for the ranks and devices
            of this process group.
        gpu_memory: GiB of a GPU. The text then says which settings fit it.

    Returns:
        The text, without a line break at its end.

    Raises:
        UserError: The run would be refused.
    """
    num_ranks = num_gpus or distributed.world_size()
    on_gpu = num_gpus is not None or distributed.device().type != "cpu"
    check_shares(config, ds_config_of(config, num_ranks), num_ranks)
    lines = [("run directory", config.run_dir), ("method", config.method)]
    if config.method in TRAINED:
        lines.append(_step_line(config, num_ranks))
    not_checked: list[str] = []
    directory = _unless_on_hub(lambda: resolve_model(config.model.path), not_checked)
    data = _unless_on_hub(lambda: load_task_data(config), not_checked)
    if directory is not None and data is not None:
        check_run(config, data, num_ranks)
    name = Path(config.model.path).name
    if directory is not None or name in OPT_SHAPES:
        model = model_sizes(config, directory or name)
        inputs = _longest_inputs(config, model) if data is None else measured_inputs(config, data)
        lines += _model_lines(config, model)
        if config.method != "adamw":
            memory = rank_memory(config, model, inputs, world_size=num_ranks, on_gpu=on_gpu)
            lines.append(_memory_line(memory, inputs, is_assumed=data is None))
            lines += _received_lines(config, model, inputs, num_ranks, on_gpu=on_gpu)
            if gpu_memory is not None:
                lines += what_fits(config, model, inputs, num_ranks, int(gpu_memory * GIB))
        lines += _disk_lines(config, model)
        if data is not None and directory is not None:
            can_measure = on_gpu == (distributed.device().type != "cpu")
            if can_measure and config.method != "adamw":
                lines.append(_time_line(config, model, directory, data, num_ranks))
            else:
                fix = "run this where such GPUs are, with a method other than adamw"
                lines.append(("time", f"not estimated: {fix}"))
    if data is not None:
        lines += _data_lines(config, data)
    lines += [("not checked", problem) for problem in not_checked]
    return "\n".join(f"{heading:13} {finding}" for heading, finding in lines)


def _unless_on_hub(check: Callable[[], T], not_checked: list[str]) -> T | None:
    """Return what a check returns. If it needs the hub, append its problem to the list instead."""
    try:
        return check()
    except HubError as error:
        problem = str(error)
        if problem not in not_checked:  # without the model, its tokenizer is missing, too
            not_checked.append(problem)
        return None


def _longest_inputs(config: RunConfig, model: ModelSizes) -> InputSizes:
    """Return the sizes of the longest inputs that may occur in a run without known data."""
    limits = [config.data.max_length]
    if model.max_length is not None:
        limits.append(model.max_length)
    return InputSizes(length=min(limits))


def _step_line(config: RunConfig, num_ranks: int) -> Line:
    train = config.train
    num_micro_batches = train.batch_size // train.micro_batch_size
    batch = f"{num_micro_batches} micro-batches of {train.micro_batch_size} examples"
    return "a step", f"{batch}, on {num_ranks} ranks; {train.steps} steps"


def _model_lines(config: RunConfig, model: ModelSizes) -> list[Line]:
    parameters = f"{model.num_parameters:,} parameters, {model.num_trained:,} trained"
    kind = f"{config.model.path}: {model.class_name}, {parameters}, {config.model.dtype}"
    blocks = f"{model.num_blocks} in {model.blocks_path}, {model.num_dropped} dropped per step"
    return [("model", kind), ("blocks", blocks)]


def _memory_line(memory: RankMemory, inputs: InputSizes, *, is_assumed: bool) -> Line:
    assumed = " (assumed)" if is_assumed else ""
    return "memory", f"of a rank, with inputs of at most {inputs.length} tokens{assumed}: {memory}"


def _received_lines(
    config: RunConfig,
    model: ModelSizes,
    inputs: InputSizes,
    num_ranks: int,
    *,
    on_gpu: bool,
) -> list[Line]:
    """Compare ZeRO-3 and tensor parallelism: what a rank receives in a step, and its memory.

    With one rank there is nothing to compare, and the heads of some models cannot be split.
    """
    if config.method not in ZEROTH_ORDER or num_ranks == 1:
        return []
    split = tensor_parallel_of(config)
    if split == 1:
        split = num_ranks  # the run uses ZeRO-3; compare it with weights that all ranks split
    sizes = [1]
    if model.heads % split == 0:
        sizes.append(split)
    received = []  # bytes
    descriptions = []
    for size in sizes:
        alternative = replace(config, tensor_parallel=size, partition_size=None, deepspeed=None)
        memory = rank_memory(alternative, model, inputs, world_size=num_ranks, on_gpu=on_gpu)
        num_bytes = received_bytes(alternative, model, inputs, ranks=num_ranks, split=size)
        name = "ZeRO-3" if size == 1 else f"tensor_parallel={size}"
        received.append(num_bytes)
        descriptions.append(f"{name} {num_bytes / 1e9:.3g} GB a step, {memory.total / GIB:.3g} GiB")
    if len(sizes) == 2:
        # Activations are proportional to the length of the examples, and weights do not depend on
        # it. At this length, both are the same number of bytes.
        weights, activations = received
        length = (inputs.mean_length or inputs.length) * weights / activations
        descriptions.append(f"ZeRO-3 receives less from {length:.3g} tokens an example on")
    return [("a rank", f"receives and holds: {'; '.join(descriptions)}")]


def what_fits(
    config: RunConfig,
    model: ModelSizes,
    inputs: InputSizes,
    num_ranks: int,
    gpu_bytes: int,
) -> list[Line]:
    """Return a line for each partition_size, with the largest micro-batch that fits a GPU.

    ZeRO-3 shards the weights, also if the run uses tensor parallelism. A last line offloads them to
    the hosts' memory if nothing fits otherwise.
    """
    own_json = config.deepspeed if tensor_parallel_of(config) == 1 else None
    zero3 = replace(config, tensor_parallel=None, deepspeed=own_json)
    partition_sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    plans = []
    for size in partition_sizes:
        partitioned = replace(zero3, partition_size=size)
        plans.append(_largest_fitting(partitioned, model, inputs, num_ranks, gpu_bytes))
    if all(memory.total > gpu_bytes for _, memory in plans):
        offloaded = replace(zero3, partition_size=num_ranks, deepspeed=_OFFLOAD)
        plans.append(_largest_fitting(offloaded, model, inputs, num_ranks, gpu_bytes))
    lines = []
    heading = "what fits"
    for planned, memory in plans:
        keys = f"partition_size={planned.partition_size}"
        keys += f" train.micro_batch_size={planned.train.micro_batch_size}"
        needs = f"{memory.total / GIB:.2f} GiB a rank"
        if memory.host:
            keys += f" deepspeed={_OFFLOAD}"
            needs += f", {memory.host / GIB:.2f} of the host's memory"
        verdict = "fits" if memory.total <= gpu_bytes else "does not fit"
        lines.append((heading, f"{keys}: {needs}, {verdict}"))
        heading = ""
    return lines


def _largest_fitting(
    config: RunConfig,
    model: ModelSizes,
    inputs: InputSizes,
    num_ranks: int,
    gpu_bytes: int,
) -> tuple[RunConfig, RankMemory]:
    """Return the run with the largest micro-batch that fits, or of 1 example; and its memory."""
    batch_size = config.train.batch_size
    for size in range(batch_size, 0, -1):
        if batch_size % size != 0:
            continue
        train = replace(config.train, micro_batch_size=size, eval_batch_size=size)
        planned = replace(config, train=train)
        splits_evenly = config.method not in TRAINED or num_passes(planned) % num_ranks == 0
        if not splits_evenly and size > 1:
            continue
        memory = rank_memory(planned, model, inputs, world_size=num_ranks)
        if memory.total <= gpu_bytes:
            break
    return planned, memory


def _disk_lines(config: RunConfig, model: ModelSizes) -> list[Line]:
    files = snapshot_sizes(config, model.num_parameters, model.num_trained)
    if not files:
        return []
    # Counter keeps the order: snapshots before checkpoints of AdamW.
    counts = [f"{number} of {size / 1e9:.3g} GB" for size, number in Counter(files).items()]
    total = f"{sum(files) / 1e9:.3g} GB"
    finding = f"{total}: snapshots, {' and '.join(counts)}, that being written included"
    return [("disk", finding)]


def _time_line(
    config: RunConfig, model: ModelSizes, directory: Path, data: TaskData, num_ranks: int
) -> Line:
    """Estimate the time on `num_ranks` ranks from a measurement on those that are here.

    All ranks share the work evenly, so the time is inversely proportional to their number.
    """
    num_here = distributed.world_size()
    planned = plan_time(config, directory, data, model.num_blocks)
    step_seconds = planned.step * num_here / num_ranks
    example_seconds = planned.example * num_here / num_ranks
    test_seconds = example_seconds * len(data.test.examples)
    origin = f"estimated from two blocks of random weights on {num_here} of {num_ranks} ranks"
    if num_here == 1 < num_ranks:
        origin += ", without their messages"
    if config.method not in TRAINED:
        return "time", f"about {duration(test_seconds)} to score the test examples; {origin}"
    num_steps = config.train.steps or 0
    num_validations = 1 + math.ceil(num_steps / eval_every(config))  # one before the first step
    dev_seconds = example_seconds * len(data.dev.examples)
    total = num_steps * step_seconds + num_validations * dev_seconds + 2 * test_seconds
    terms = [
        f"{num_steps} steps of {step_seconds:.3g} s",
        f"{num_validations} validations of {duration(dev_seconds)}",
        f"2 tests of {duration(test_seconds)}",
    ]
    besides = "besides loading and snapshots"
    return "time", f"about {duration(total)}, {besides}: {', '.join(terms)}; {origin}"


def _data_lines(config: RunConfig, data: TaskData) -> list[Line]:
    sizes = ", ".join(
        [
            f"{len(data.train.encoded)} train",
            f"{len(data.dev.encoded)} dev",
            f"{len(data.test.encoded)} test",
        ]
    )
    task = f"{data.task.name}, protocol {config.data.protocol}: {sizes}"
    return [("data", task), ("first example", _shown_example(data))]


def _shown_example(data: TaskData) -> str:
    """Return the end of the first training example, with the answer that it is trained on."""
    encoded = data.train.encoded[0]
    # A record without a right answer has no sequence, only a prompt.
    ids = encoded.sequences[encoded.label or 0] if encoded.sequences else data.train.prompts[0]
    text: str = data.tokenizer.backend.decode(list(ids), clean_up_tokenization_spaces=False)
    # JSON shows line breaks and spaces at the ends.
    shown = json.dumps(text[-_MAX_SHOWN:], ensure_ascii=False)
    return shown if len(text) <= _MAX_SHOWN else f"[...] {shown}"
