"""train --dry-run: checks all that needs no weights; shows memory, disk and time of the run.

The result is a text with a line for each finding, such as

    run directory runs/first
    method        lezo
    a step        4 micro-batches of 4 examples, on 4 ranks; 10 steps
    model         opt-1.3b: OPTForCausalLM, 1,315,758,080 parameters, 1,315,758,080 trained, bf16
    blocks        24 in model.decoder.layers, 12 dropped per step
    disk          15.8 GB: snapshots, 3 of 5.26 GB, that being written included
    memory        of a rank, with inputs of at most 2048 tokens (assumed): 5.15 GiB: ...
    a GPU         of 24 GB has 22.5 GiB; ways that fit come first, and the fastest first
    a way         train.micro_batch_size=4 partition_size=1: 8.35 GiB a rank, receives 0 GB ...
    a way         train.micro_batch_size=8 tensor_parallel=2: 5.21 GiB a rank, receives 0.11 ...
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
from lezo_ds.config import (
    TRAINED,
    RunConfig,
    config_to_dict,
    copies_per_pass,
    eval_every,
    num_passes,
)
from lezo_ds.config.deepspeed import (
    check_shares,
    ds_config_of,
    needs_zero3,
    tensor_parallel_of,
)
from lezo_ds.config.schema import READER
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.errors import HubError, UserError
from lezo_ds.runs.records import with_start_date
from lezo_ds.runs.screen import duration
from lezo_ds.runs.trainer import check_run
from lezo_ds.tools.memory_plan import (
    GIB,
    RankMemory,
    memory_of_card,
    rank_memory,
    received_bytes,
    snapshot_sizes,
)
from lezo_ds.tools.sizes import OPT_SHAPES, InputSizes, ModelSizes, measured_inputs, model_sizes
from lezo_ds.tools.time_plan import plan_time

T = TypeVar("T")
Line = tuple[str, str]  # a heading and what was found

_MAX_SHOWN = 160  # characters of the first example
_OFFLOAD = "zero3_cpu_offload"

# Tokens of the longest example and of an example on average, where the data cannot be read.
_TYPICAL_INPUTS = {
    "sst2": (72, 20),
    "copa": (32, 16),
    "wic": (96, 40),
    "wsc": (128, 48),
    "rte": (288, 88),
    "cb": (288, 100),
    "record": (640, 280),
    "boolq": (784, 148),
    "multirc": (800, 360),
    "squad": (896, 180),
    "drop": (1024, 330),
}

# Models whose blocks AutoTP does not split (docs/clusters.md).
_UNSPLIT = ("GPT2", "Mixtral", "Qwen3Moe", "Phi3", "Olmo2", "Falcon", "Bloom")

# Bytes a second between two GPUs (PCIe), and of the memory of a GPU. They only order what fits.
_LINK = 25e9
_GPU_MEMORY = 1e12


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
        gpu_memory: Size of a GPU (see `memory_of_card`). The text then says which settings fit it,
            also if this configuration does not run on so many GPUs.
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
    lines = [("run directory", config.run_dir), ("method", config.method)]
    try:
        check_shares(config, ds_config_of(config, num_ranks), num_ranks)
    except UserError as error:
        if gpu_memory is None:
            raise
        lines.append(("refused", str(error)))
    if config.method in TRAINED:
        num_micro_batches = train.batch_size // train.micro_batch_size
        batch = f"{num_micro_batches} micro-batches of {train.micro_batch_size} examples"
        lines.append(("a step", f"{batch}, on {num_ranks} ranks; {train.steps} steps"))
        comparison = "a comparison of its passes with the model alone, which takes the weights"
        lines.append(("a run adds", comparison))
    not_checked: list[str] = []
    directory = _unless_on_hub(lambda: resolve_model(config.model.path), not_checked)
    dated = with_start_date(config)
    data = _unless_on_hub(lambda: load_task_data(dated), not_checked)
    if directory is not None and data is not None:
        check_run(dated, data, num_ranks)
    name = Path(config.model.path).name
    if directory is not None or name in OPT_SHAPES:
        model = model_sizes(config, directory or name)
        lines += _model_lines(config, model)
        if config.method != "adamw":
            plan = Plan(config, model, _inputs(config, model, data), num_ranks, on_gpu)
            assumed = "" if data is not None else " (assumed)"
            tokens = f"inputs of at most {plan.inputs.length} tokens{assumed}"
            lines.append(("memory", f"of a rank, with {tokens}: {plan.memory()}"))
            if num_ranks > 1 or gpu_memory is not None:
                lines += plan.ways(gpu_memory)
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


def _inputs(config: RunConfig, model: ModelSizes, data: TaskData | None) -> InputSizes:
    """Return the sizes of the inputs, or typical ones of the task if they cannot be read."""
    if data is not None:
        return measured_inputs(config, data)
    max_length = min(config.data.max_length, model.max_length or config.data.max_length)
    typical = _TYPICAL_INPUTS.get(config.data.task)
    if typical is None or config.method == "icl":  # demonstrations fill the input
        return InputSizes(max_length)
    return InputSizes(*typical)


def _model_lines(config: RunConfig, model: ModelSizes) -> list[Line]:
    """Return what is known of the model and of its snapshots."""
    parameters = f"{model.num_parameters:,} parameters, {model.num_trained:,} trained"
    kind = f"{config.model.path}: {model.class_name}, {parameters}, {config.model.dtype}"
    if config.model.bits:
        kind += f", blocks in {config.model.bits} bits"
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

    def ways(self, gpu_memory: float | None) -> list[Line]:
        """Return a line for each way to share the weights, with the largest micro-batch that fits.

        The ways are ZeRO-3 among `partition_size` ranks, and tensor parallelism; a part of all
        ranks then holds the model. If nothing fits, a last way offloads to the hosts' memory.
        Without the memory of a GPU, everything fits.
        """
        gpu_bytes = math.inf if gpu_memory is None else memory_of_card(gpu_memory)
        plans = self.ordered(gpu_bytes)
        if not any(plan.fits(gpu_bytes) for plan in plans):
            plans.append(self.offloaded(gpu_bytes))
            plans.sort(key=lambda plan: not plan.fits(gpu_bytes))
        lines = [("a way", self._description(plan, gpu_bytes)) for plan in plans]
        if gpu_memory is not None:
            has = f"of {gpu_memory:g} GB has {gpu_bytes / GIB:.1f} GiB"
            lines.insert(0, ("a GPU", f"{has}; ways that fit come first, and the fastest first"))
        return lines

    def ordered(self, gpu_bytes: float) -> list[Plan]:
        """Return the ways to share the weights: those that fit first, and the fastest first."""
        plans = [plan._largest_fitting(gpu_bytes) for plan in self._ways()]
        plans = [plan for plan in plans if plan.splits_evenly()]
        plans.sort(key=lambda plan: (not plan.fits(gpu_bytes), plan.step_seconds()))
        return plans

    def offloaded(self, gpu_bytes: float) -> Plan:
        """Return the plan whose weights are in the memory of the hosts."""
        offloaded = self.changed(
            tensor_parallel=None, partition_size=self.num_ranks, deepspeed=_OFFLOAD
        )
        return offloaded._largest_fitting(gpu_bytes)

    def fits(self, gpu_bytes: float) -> bool:
        """Return whether a GPU of so many bytes can hold what a rank needs."""
        return self.memory().total <= gpu_bytes

    def _ways(self) -> list[Plan]:
        """Return the plans with each way to share the weights among the ranks."""
        zero3 = self.changed(tensor_parallel=None)
        if tensor_parallel_of(zero3.config) > 1:  # in the JSON
            zero3 = self.changed(tensor_parallel=1)
        is_unsplit = self.model.class_name.startswith(_UNSPLIT) or needs_zero3(self.config)
        ways = []
        for size in range(1, self.num_ranks + 1):
            if self.num_ranks % size != 0:
                continue
            ways.append(zero3.changed(partition_size=size))
            if not is_unsplit and size > 1 and self.model.heads % size == 0:
                split = self.changed(tensor_parallel=size, partition_size=None)
                try:
                    ds_config_of(split.config, self.num_ranks)
                except UserError:  # the JSON offloads the weights
                    split = split.changed(deepspeed=None)
                ways.append(split)
        return ways

    def _description(self, plan: Plan, gpu_bytes: float) -> str:
        """Return the keys that turn this run into another plan, and what that needs."""
        own = READER.flatten(config_to_dict(self.config))
        shown = ["partition_size", "train.micro_batch_size"]
        if tensor_parallel_of(plan.config) > 1:
            shown[0] = "tensor_parallel"
        keys = []
        for key, value in READER.flatten(config_to_dict(plan.config)).items():
            if key in shown or value != own[key]:
                keys.append(f"{key}={'null' if value is None else value}")
        memory = plan.memory()
        needs = f"{memory.total / GIB:.2f} GiB a rank"
        if memory.host:
            needs += f", {memory.host / GIB:.2f} of the host's memory"
        needs += f", receives {plan.received() / 1e9:.3g} GB a step"
        if gpu_bytes < math.inf:
            needs += ", fits" if plan.fits(gpu_bytes) else ", does not fit"
        return f"{' '.join(keys)}: {needs}"

    def splits_evenly(self) -> bool:
        """Return whether all ranks have the same share of a step."""
        num_groups = self.num_ranks // tensor_parallel_of(self.config)
        return self.config.method not in TRAINED or num_passes(self.config) % num_groups == 0

    def received(self) -> int:
        """Return the bytes that a rank receives in a step."""
        split = tensor_parallel_of(self.config)
        return received_bytes(
            self.config, self.model, self.inputs, ranks=self.num_ranks, split=split
        )

    def step_seconds(self) -> float:
        """Return the seconds of messages, and of weights on their way through a GPU's memory.

        The products of a step are the same number in all plans, and left out.
        """
        split = tensor_parallel_of(self.config)
        passes_of_rank = max(1, num_passes(self.config) * split / self.num_ranks)
        kept = 1 - self.model.num_dropped / self.model.num_blocks
        # A weight is read, and its copies are written and read.
        num_accesses = 1 + 2 * copies_per_pass(self.config) * kept
        weight_bytes = self.model.num_stored * self.model.itemsize / split
        return self.received() / _LINK + passes_of_rank * num_accesses * weight_bytes / _GPU_MEMORY

    def _largest_fitting(self, gpu_bytes: float) -> Plan:
        """Return the plan with the largest micro-batch that fits, or of 1 example."""
        train = self.config.train
        plan = self
        for size in range(train.batch_size, 0, -1):
            if train.batch_size % size != 0:
                continue
            for eval_size in (train.eval_batch_size, min(size, train.eval_batch_size)):
                sizes = replace(train, micro_batch_size=size, eval_batch_size=eval_size)
                plan = self.changed(train=sizes)
                if plan.splits_evenly() and plan.fits(gpu_bytes):
                    return plan
        return plan


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
        lines.append(("faster", _faster(config, data)))
    return lines


def _faster(config: RunConfig, data: TaskData) -> str:
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
