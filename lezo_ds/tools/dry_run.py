"""train --dry-run: checks all that needs no weights; shows memory, disk and time of the run.

The result is a text with a line for each finding, such as

    run directory runs/first
    method        lezo
    a step        4 micro-batches of 4 examples, on 4 ranks; 10 steps
    model         opt-1.3b: OPTForCausalLM, 1,315,758,080 parameters, 1,315,758,080 trained, bf16
    blocks        24 in model.decoder.layers, 12 dropped per step
    disk          15.8 GB: snapshots, 3 of 5.26 GB, that being written included
    memory        of a rank, with inputs of at most 2048 tokens (assumed): 5.15 GiB: ...
    a rank        receives and holds: ZeRO-3 1.97 GB a step, 5.15 GiB; tensor_parallel=4 ...
    what fits     partition_size=1 train.micro_batch_size=4: 8.35 GiB a rank, fits
    what fits     partition_size=2 train.micro_batch_size=4: 6.37 GiB a rank, fits
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

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


LONG_STEP = 10.0
"""Seconds. If a step takes longer, the text says what would be faster."""


def dry_run(
    config: RunConfig,
    num_gpus: int | None = None,
    gpu_memory: float | None = None,
    seconds: tuple[float, float] | None = None,
) -> str:
    """Check a configuration, and describe its run. A collective.

    Args:
        config: The run.
        num_gpus: Plan for so many GPUs with a rank on each. None plans for the ranks and devices
            of this process group.
        gpu_memory: GiB of a GPU. The text then says which settings fit it.
        seconds: The result of `plan_time`, if it is known.

    Returns:
        The text, without a line break at its end.

    Raises:
        UserError: The run would be refused.
    """
    num_ranks = num_gpus or distributed.world_size()
    has_gpu = distributed.device().type != "cpu"
    on_gpu = has_gpu or num_gpus is not None or gpu_memory is not None
    train = config.train
    check_shares(config, ds_config_of(config, num_ranks), num_ranks)
    lines = [("run directory", config.run_dir), ("method", config.method)]
    if config.method in TRAINED:
        num_micro_batches = train.batch_size // train.micro_batch_size
        batch = f"{num_micro_batches} micro-batches of {train.micro_batch_size} examples"
        lines.append(("a step", f"{batch}, on {num_ranks} ranks; {train.steps} steps"))
    not_checked: list[str] = []
    directory = _unless_on_hub(lambda: resolve_model(config.model.path), not_checked)
    data = _unless_on_hub(lambda: load_task_data(config), not_checked)
    if directory is not None and data is not None:
        check_run(config, data, num_ranks)
    name = Path(config.model.path).name
    if directory is not None or name in OPT_SHAPES:
        model = model_sizes(config, directory or name)
        lines += _model_lines(config, model)
        if config.method != "adamw":
            assumed = ""
            if data is not None:
                inputs = measured_inputs(config, data)
            else:
                max_length = config.data.max_length
                inputs = InputSizes(min(max_length, model.max_length or max_length))
                assumed = " (assumed)"
            plan = Plan(config, model, inputs, num_ranks, on_gpu)
            tokens = f"inputs of at most {inputs.length} tokens{assumed}"
            lines.append(("memory", f"of a rank, with {tokens}: {plan.memory()}"))
            lines += plan.received_lines()
            if gpu_memory is not None:
                lines += plan.what_fits(int(gpu_memory * GIB))
        if data is not None and directory is not None:
            if on_gpu == has_gpu and config.method != "adamw":
                if seconds is None:
                    seconds = plan_time(config, directory, data, model.num_blocks)
                lines += _time_lines(config, data, num_ranks, seconds)
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


def _model_lines(config: RunConfig, model: ModelSizes) -> list[Line]:
    """Return what is known of the model and of its snapshots."""
    parameters = f"{model.num_parameters:,} parameters, {model.num_trained:,} trained"
    kind = f"{config.model.path}: {model.class_name}, {parameters}, {config.model.dtype}"
    blocks = f"{model.num_blocks} in {model.blocks_path}, {model.num_dropped} dropped per step"
    lines = [("model", kind), ("blocks", blocks)]
    files = snapshot_sizes(config, model.num_parameters, model.num_trained)
    if files:
        # Counter keeps the order: snapshots before checkpoints of AdamW.
        counts = [f"{number} of {size / 1e9:.3g} GB" for size, number in Counter(files).items()]
        total = f"{sum(files) / 1e9:.3g} GB"
        finding = f"{total}: snapshots, {' and '.join(counts)}, that being written included"
        lines.append(("disk", finding))
    return lines


@dataclass(frozen=True)
class Plan:
    """A run whose ranks may not be here.

    Attributes:
        config: The run.
        model: The sizes of its whole model.
        inputs: The sizes of its largest forward passes.
        num_ranks: Number of ranks.
        on_gpu: Whether each rank has a GPU.
    """

    config: RunConfig
    model: ModelSizes
    inputs: InputSizes
    num_ranks: int
    on_gpu: bool = True

    def memory(self) -> RankMemory:
        """Return the memory of the rank that needs most."""
        return rank_memory(
            self.config, self.model, self.inputs, world_size=self.num_ranks, on_gpu=self.on_gpu
        )

    def changed(self, **keys: Any) -> Plan:
        """Return the plan of the run with other values of some keys."""
        return replace(self, config=replace(self.config, **keys))

    def received_lines(self) -> list[Line]:
        """Compare ZeRO-3 and tensor parallelism: what a rank receives in a step, and its memory.

        With one rank there is nothing to compare, and the heads of some models cannot be split.
        """
        if self.config.method not in ZEROTH_ORDER or self.num_ranks == 1:
            return []
        split = tensor_parallel_of(self.config)
        if split == 1:
            split = self.num_ranks  # the run uses ZeRO-3; compare it with weights that all split
        sizes = [1]
        if self.model.heads % split == 0:
            sizes.append(split)
        received = []  # bytes
        descriptions = []
        for size in sizes:
            plan = self.changed(tensor_parallel=size, partition_size=None, deepspeed=None)
            num_bytes = received_bytes(
                plan.config, self.model, self.inputs, ranks=self.num_ranks, split=size
            )
            name = "ZeRO-3" if size == 1 else f"tensor_parallel={size}"
            memory = f"{plan.memory().total / GIB:.3g} GiB"
            received.append(num_bytes)
            descriptions.append(f"{name} {num_bytes / 1e9:.3g} GB a step, {memory}")
        if len(sizes) == 2:
            # Activations are proportional to the length of the examples, and weights do not depend
            # on it. At this length, both are the same number of bytes.
            weights, activations = received
            mean_length = self.inputs.mean_length or self.inputs.length
            length = mean_length * weights / activations
            descriptions.append(f"ZeRO-3 receives less from {length:.3g} tokens an example on")
        return [("a rank", f"receives and holds: {'; '.join(descriptions)}")]

    def what_fits(self, gpu_bytes: int) -> list[Line]:
        """Return a line for each partition_size, with the largest micro-batch that fits a GPU.

        ZeRO-3 shards the weights, also if the run uses tensor parallelism. A last line offloads
        them to the hosts' memory if nothing fits otherwise.
        """
        own_json = self.config.deepspeed if tensor_parallel_of(self.config) == 1 else None
        zero3 = self.changed(tensor_parallel=None, deepspeed=own_json)
        plans = []
        for size in range(1, self.num_ranks + 1):
            if self.num_ranks % size == 0:
                plans.append(zero3.changed(partition_size=size)._largest_fitting(gpu_bytes))
        if all(memory.total > gpu_bytes for _, memory in plans):
            offloaded = zero3.changed(partition_size=self.num_ranks, deepspeed=_OFFLOAD)
            plans.append(offloaded._largest_fitting(gpu_bytes))
        lines = []
        for config, memory in plans:
            keys = f"partition_size={config.partition_size}"
            keys += f" train.micro_batch_size={config.train.micro_batch_size}"
            needs = f"{memory.total / GIB:.2f} GiB a rank"
            if memory.host:
                keys += f" deepspeed={_OFFLOAD}"
                needs += f", {memory.host / GIB:.2f} of the host's memory"
            verdict = "fits" if memory.total <= gpu_bytes else "does not fit"
            lines.append(("what fits", f"{keys}: {needs}, {verdict}"))
        return lines

    def _largest_fitting(self, gpu_bytes: int) -> tuple[RunConfig, RankMemory]:
        """Return the run with the largest micro-batch that fits, or of 1 example; its memory."""
        train = self.config.train
        for size in range(train.batch_size, 0, -1):
            if train.batch_size % size != 0:
                continue
            plan = self.changed(train=replace(train, micro_batch_size=size, eval_batch_size=size))
            is_trained = self.config.method in TRAINED
            if size > 1 and is_trained and num_passes(plan.config) % self.num_ranks != 0:
                continue
            memory = plan.memory()
            if memory.total <= gpu_bytes:
                break
        return plan.config, memory


def _time_lines(
    config: RunConfig, data: TaskData, num_ranks: int, seconds: tuple[float, float]
) -> list[Line]:
    """Estimate the time on `num_ranks` ranks from a measurement on those that are here.

    All ranks share the work evenly, so the time is inversely proportional to their number.
    """
    num_here = distributed.world_size()
    step_seconds, example_seconds = (value * num_here / num_ranks for value in seconds)
    test_seconds = example_seconds * len(data.test.examples)
    origin = f"estimated from two blocks of random weights on {num_here} of {num_ranks} ranks"
    if num_here == 1 < num_ranks:
        origin += ", without their messages"
    if config.method not in TRAINED:
        return [("time", f"about {duration(test_seconds)} to score the test examples; {origin}")]
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
    lines = [("time", f"about {duration(total)}, {besides}: {', '.join(terms)}; {origin}")]
    if step_seconds > LONG_STEP:
        lines.append(("faster", faster(config, data)))
    return lines


def faster(config: RunConfig, data: TaskData) -> str:
    """Return what would make a step faster."""
    ways = ["shorter texts (data.max_length)", "a smaller model", "more ranks", "a GPU"]
    if config.zo.directions > 7:  # FZOO needs four
        ways.insert(0, f"zo.directions={config.zo.directions // 2}")
    half = config.train.batch_size // 2
    if half:
        size = math.gcd(half, config.train.micro_batch_size)
        ways.insert(0, f"train.batch_size={half} train.micro_batch_size={size}")
    options = data.train.encoded[0].option_lengths
    if len(options) > 1 and max(options) > 1:
        ways.insert(0, "labels of one token each (a map in data.labels)")
    return ", ".join(ways)


def _data_lines(config: RunConfig, data: TaskData) -> list[Line]:
    """Return the sizes of the splits, and the end of the first training example.

    The example has the answer that it is trained on.
    """
    splits = {"train": data.train, "dev": data.dev, "test": data.test}
    sizes = [f"{len(split.encoded)} {name}" for name, split in splits.items()]
    task = f"{data.task.name}, protocol {config.data.protocol}: {', '.join(sizes)}"
    encoded = data.train.encoded[0]
    # A record without a right answer has no sequence, only a prompt.
    ids = encoded.sequences[encoded.label or 0] if encoded.sequences else data.train.prompts[0]
    text: str = data.tokenizer.backend.decode(list(ids), clean_up_tokenization_spaces=False)
    # JSON shows line breaks and spaces at the ends.
    shown = json.dumps(text[-_MAX_SHOWN:], ensure_ascii=False)
    if len(text) > _MAX_SHOWN:
        shown = f"[...] {shown}"
    return [("data", task), ("first example", shown)]
