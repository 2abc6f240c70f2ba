"""train --dry-run: checks a run, and shows its memory, disk and time.

The result is lines, one for each finding, such as

    model         opt-1.3b: OPTForCausalLM, 1,315,758,080 parameters, 1,315,758,080 trained, bf16
    blocks        24, 12 dropped per step
    disk          at most 3 snapshots of 5.26 GB at a time, and an export of 2.63 GB
    memory        of a rank, with inputs of at most 2048 tokens (assumed): 5.15 GiB: weights ...
    a GPU         of 24 GB has 22.5 GiB; ways that fit come first, the fewest messages first
    a way         train.micro_batch_size=4 partition_size=1: 8.35 GiB a rank, receives 0 GB ...
    a way         train.micro_batch_size=8 tensor_parallel=2: 5.21 GiB a rank, receives 0.11 ...
    data          sst2, protocol clean: 1000 train, 500 dev, 872 test
    reads  '</s>a gripping film It was great'
    learns  [' great'] label 1
    time          about 0:42, besides loading, evaluations and snapshots: 10 steps of 0.41 s

Bad input raises the errors that a run would raise before it loads weights. A model or data on the
Hub that cannot be reached is not an error: a line says what is not checked. The time is that
of a few steps of the run itself, if this process group is that of the run and can hold the model.

Measured peaks are within 20 % of the formula (tests/unit/test_memory_plan.py). With b bytes a
weight, R ranks that share the weights by ZeRO-3, and c copies of the batch in a forward pass
(zo.probes_per_pass), a rank has the sum of four terms:

    weights      its part of all weights, with the low bits of trained ones if zo.update_precision
                 is fp32_master and b is 2. If R > 1, also what is gathered: the block that runs,
                 the next one (on a GPU one more, because the host runs ahead), and tied weights
                     (b x parameters + 2 x trained) / R + b x (2 or 3 x largest part + tied)
    copies       the perturbed weights of the block that runs, at most 2 copies at a time. A run
                 that trains on answers writes those of one probe after the other, and keeps all
                 copies of the probe. Directions of low rank have their vectors instead. With
                 model.bits, also the dequantized matrix of the module that runs
    activations  of the block that runs, with the keys and values of all blocks while answers are
                 written; or those of the output head with its logits, if they are more
                     b x c x tokens x width of a block's activations
    reserve      what the libraries need (on a CPU measured, on a GPU assumed), and what a snapshot
                 needs beyond a pass: the largest parameter, and on a CPU a file of at most 1 GiB

If N ranks split each weight (tensor parallelism), a rank has its part of all weights, and of the
activations inside a block. Each term is at its own maximum, although not all of them are at the
same moment. On CPUs, loading 16-bit weights may need more.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import OPTConfig

from lezo_ds import distributed
from lezo_ds.checkpoints.checkpoint import DTYPES, build_model, build_on_meta, resolve_model
from lezo_ds.checkpoints.snapshots import MAX_FILE_BYTES
from lezo_ds.config import (
    RunConfig,
    config_from_dict,
    make_layer_policy,
    num_directions,
    num_passes,
    probes_per_pass,
    trained_part,
    with_steps,
)
from lezo_ds.config.deepspeed import (
    check_shares,
    ds_config_of,
    offloads_weights,
    tensor_parallel_size,
)
from lezo_ds.data.batches import PAD_MULTIPLE
from lezo_ds.data.task_data import TaskData, load_task_data
from lezo_ds.errors import HubError, UserError
from lezo_ds.forward.adapters import make_adapter
from lezo_ds.forward.blocks import (
    find_blocks,
    freeze_all_but,
    gather_sizes,
    key_value_shape,
    quantized_matrices,
)
from lezo_ds.forward.dense import COPIES_AT_ONCE
from lezo_ds.forward.head import TARGETS_AT_ONCE
from lezo_ds.runs.cross_check import cross_check
from lezo_ds.runs.records import with_start_date
from lezo_ds.runs.screen import duration
from lezo_ds.runs.trainer import check_run, make_engine
from lezo_ds.sharding.quantization import num_trained_codes, quantize_parameters
from lezo_ds.sharding.tensor_parallel import vocabulary_modules

GIB = 1 << 30
CPU_RESERVE = int(0.68 * GIB)
"""Measured: the peak of a run with a model of 10 MB, so Python with all libraries and the data."""
GPU_RESERVE = int(2.0 * GIB)
"""Assumed: CUDA's context, NCCL's buffers, and what the allocator cannot use."""
LONG_STEP = 10.0
"""Seconds. If a step takes longer, a line says what would be faster."""
OPT_SHAPES = {
    "opt-tiny": (4, 32, 2),  # not published: small enough to try a command on any machine
    "opt-125m": (12, 768, 12),
    "opt-1.3b": (24, 2048, 32),
    "opt-2.7b": (32, 2560, 32),
    "opt-6.7b": (32, 4096, 32),
    "opt-13b": (40, 5120, 40),
    "opt-30b": (48, 7168, 56),
    "opt-66b": (64, 9216, 72),
}
"""Numbers of blocks, width and number of heads (Zhang et al. 2022, table 1)."""
# What CUDA finds, in GiB, in a card by the gigabytes that it is sold with.
_CARDS: dict[float, float] = {
    16: 14.7,
    24: 22.5,
    32: 31.3,
    40: 39.4,
    48: 44.4,
    80: 79.1,
    96: 94.9,
    141: 139.7,
}
_LOW_BITS = 2  # bytes of the low bits of a 16-bit weight
_FP32 = 4
# Activations of the model's width that are in memory while a block runs: the embeddings of tokens
# and of positions, the input of the block, the residual, and the output of the norm.
_HIDDEN_STATES = 5
_UNSPLIT = ("GPT2", "Mixtral", "Qwen3Moe", "Phi3", "Olmo2", "Falcon", "Bloom")
"""Models whose blocks AutoTP does not split (docs/clusters.md)."""
_MEASURED_STEPS = 3
_ENOUGH_SECONDS = 5.0  # after which no other step is measured
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
        UserError: The run would be refused. If the question is what fits, the lines come first.
    """
    num_ranks = num_gpus or distributed.world_size()
    has_gpu = distributed.device().type != "cpu"
    on_gpu = has_gpu or num_gpus is not None or gpu_memory is not None
    refusal: UserError | None = None
    try:
        check_shares(config, ds_config_of(config, num_ranks), num_ranks)
    except UserError as error:
        if gpu_memory is None:
            raise
        refusal = error
        yield f"refused       {error}"
    name = Path(config.model.path).name
    source: Path | str = name
    data: TaskData | None = None
    not_checked = ""
    try:
        source = resolve_model(config.model.path)
        config = with_start_date(config)
        data = load_task_data(config)
        config = with_steps(config, len(data.train.examples))
        check_run(config, data)
    except HubError as error:
        not_checked = f"not checked   {error}"
    if source != name or name in OPT_SHAPES:
        inputs = longest_inputs(config) if data is None else measured_inputs(config, data)
        plan = Plan(config, ModelSizes(config, source), inputs, num_ranks, on_gpu)
        yield from _plan_lines(plan, "" if data else " (assumed)")
        if num_ranks > 1 or gpu_memory is not None:
            yield from _way_lines(plan, gpu_memory)
    if not_checked:
        yield not_checked
    elif data is not None:
        splits = {"train": data.train, "dev": data.dev, "test": data.test}
        sizes = ", ".join(f"{len(split.encoded)} {name}" for name, split in splits.items())
        yield f"data          {data.task.name}, protocol {config.data.protocol}: {sizes}"
        yield from example_lines(data, 1)
        if refusal is None:
            seconds = step_seconds or measured_step(plan, data)
            yield from time_lines(config, seconds)
    if refusal is not None:
        raise refusal


def example_lines(data: TaskData, number: int) -> Iterator[str]:
    """Yield what the model reads and learns of the first training examples.

    `reads` has the whole text with the right answer, `learns` the tokens that the loss is about,
    and `label` is the index of the right candidate. A prompt that the model answers by itself has
    one line.
    """
    tokenizer = data.reader.tokenizer.backend
    for prompt in filter(None, data.train.prompts[:number]):
        yield f"reads  {tokenizer.decode(list(prompt))!r}"
    for encoded in data.train.encoded[:number]:
        if encoded.label is None:
            continue
        ids = encoded.sequences[encoded.label]
        learned = [tokenizer.decode([ids[place]]) for place in encoded.targets(encoded.label)]
        yield f"reads  {tokenizer.decode(list(ids))!r}"
        yield f"learns  {learned} label {encoded.label}"


def measured_step(plan: Plan, data: TaskData, most: int = _MEASURED_STEPS) -> float | None:
    """Load a run's model, and return the seconds of the fastest of a few steps. A collective.

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
    cross_check(engine, data, plan.config, data.step_rows(plan.config, 0))
    seconds: list[float] = []
    while len(seconds) < most and sum(seconds) < _ENOUGH_SECONDS:
        start = time.perf_counter()
        engine.train_batch(data.step_batch(plan.config, len(seconds)), data.loss)
        distributed.barrier()  # the GPUs have done their work, too
        seconds.append(distributed.broadcast_object(time.perf_counter() - start))
    return min(seconds)


def _plan_lines(plan: Plan, assumed: str) -> Iterator[str]:
    """Yield what is known of the model, its snapshots, and the memory of a rank."""
    config = plan.config
    model = plan.model
    kind = f"{config.model.path}: {model.class_name}, {model.num_parameters:,} parameters"
    yield f"model         {kind}, {model.num_trained:,} trained, {config.model.dtype}"
    yield f"blocks        {model.num_blocks}, {model.num_dropped} dropped per step"
    train = config.train
    number = 1 if train.snapshot_every == 0 else max(1, train.keep_snapshots) + 1
    size = f"{plan.snapshot / 1e9:.3g} GB"
    yield f"disk          at most {number} snapshots of {size} at a time, besides exports"
    terms = ", ".join(f"{name} {size / GIB:.2f}" for name, size in plan.memory.items())
    tokens = f"inputs of at most {plan.inputs.length} tokens{assumed}"
    yield f"memory        of a rank, with {tokens}: {plan.needs()}: {terms}"


def _way_lines(plan: Plan, gpu_memory: float | None) -> Iterator[str]:
    """Yield a line for each way to share the weights. Without a GPU's memory, everything fits."""
    gpu_bytes = math.inf
    if gpu_memory is not None:
        gpu_bytes = memory_of_card(gpu_memory)
        has = f"of {gpu_memory:g} GB has {gpu_bytes / GIB:.1f} GiB"
        yield f"a GPU         {has}; ways that fit come first, the fewest messages first"
    for keys, way in plan.ways(gpu_bytes):
        needs = f"{way.needs()} a rank, receives {way.received() / 1e9:.3g} GB a step"
        fits = "fits" if way.peak <= gpu_bytes else "does not fit"
        yield f"a way         {keys}: {needs}, {fits}"


def time_lines(config: RunConfig, step_seconds: float | None) -> Iterator[str]:
    """Yield the time of all steps, from that of one."""
    if step_seconds is None:
        yield "time          not measured: for that, start the dry run as the run, where it fits"
        return
    num_steps = config.train.steps or 0
    total = f"{duration(num_steps * step_seconds)}, besides loading, evaluations and snapshots"
    yield f"time          about {total}: {num_steps} steps of {step_seconds:.3g} s"
    if step_seconds > LONG_STEP:
        yield f"faster        {_FASTER}"


def memory_of_card(size: float) -> int:
    """Return the bytes of a GPU: of a card that is sold with so many gigabytes, or else of GiB.

    Cards of one size differ by some percent. The smallest of them counts, such as L4 and A10G,
    which keep a part of their 24 GB for the correction of errors.
    """
    return int(_CARDS.get(size, size) * GIB)


def opt_config(shape: str) -> OPTConfig:
    """Return the configuration of a published OPT, without its weights."""
    num_blocks, width, num_heads = OPT_SHAPES[shape]
    return OPTConfig(
        hidden_size=width,
        word_embed_proj_dim=width,
        ffn_dim=4 * width,
        num_hidden_layers=num_blocks,
        num_attention_heads=num_heads,
    )


@dataclass(frozen=True)
class InputSizes:
    """Sizes of the largest forward passes.

    Attributes:
        length: Tokens of the longest input, with its padding.
        mean_length: Tokens of a training example on average.
        rows: Rows of this length for a training example: about one for each candidate, and fewer
            if examples share rows.
        targets: Rows of logits for an example: one for each token of its answers. 0 if training
            compares a few entries of the vocabulary, which take next to nothing.
        new_tokens: Tokens that the model writes after a prompt in an evaluation.
        trains_on_answers: Whether the model writes answers in training, too.
    """

    length: int
    mean_length: float
    rows: float = 1
    targets: float = 0
    new_tokens: int = 0
    trains_on_answers: bool = False


def longest_inputs(config: RunConfig) -> InputSizes:
    """Return the sizes of the inputs of a task whose data cannot be read: as long as they may be.

    An example has a quarter of these tokens on average.
    """
    length = config.data.max_length
    return InputSizes(length, mean_length=length / 4)


def measured_inputs(config: RunConfig, data: TaskData) -> InputSizes:
    """Return the sizes of a run's longest inputs, from its examples."""
    splits = (data.train, data.dev, data.test)
    lengths = [split.longest_prompt for split in splits]
    lengths += [split.lengths.max(initial=0) for split in splits]
    length = math.ceil(max(lengths) / PAD_MULTIPLE) * PAD_MULTIPLE
    by_length = data.train.lengths.argsort(kind="stable")
    longest = by_length[-config.train.micro_batch_size :].tolist()
    batch = data.training_batch(longest)
    targets = 0.0
    if batch.selection is not None and batch.selection.vocabulary is None:
        targets = len(batch.selection.rows) / len(longest)
    answers = data.reader.generation
    return InputSizes(
        length=length,
        mean_length=float(data.train.lengths.mean()),
        rows=batch.inputs["input_ids"].numel() / len(longest) / length,
        targets=targets,
        new_tokens=0 if answers is None else answers.max_new_tokens,
        trains_on_answers=data.objective.reads_answers,
    )


class ModelSizes:
    """A model with the adapter that is trained on it, built on the meta device: no weight is read.

    Sizes are numbers of elements, unless another unit is named.

    Attributes:
        class_name: Class of the model.
        itemsize: Bytes of a weight.
        num_blocks: Number of transformer blocks.
        num_dropped: Number of blocks that a step drops.
        num_parameters: Size of all parameters, however they are stored.
        num_codes: Number of the trained codes of 8 bits.
        num_trained: Size of all trained parameters.
        perturbed: Numbers of a direction of all blocks: one for each trained weight, or those of
            the vectors of low rank.
        head: Weights of the output head, if it is trained.
        stored: Size of each parameter as it is stored, quantized or not. A tied one appears once.
        stored_bytes: Bytes of all of them.
        parts: What ZeRO-3 gathers at a time.
        largest_matrix: Size of the largest matrix of a block, quantized or not.
        hidden_width: Width of the activations between blocks.
        inner_width: Activations of one token inside a block.
        cached_width: Keys and values of one token in one block.
        vocabulary_size: Logits of one token.
        num_heads: Heads of the keys and values. The divisors of this number can split a block.
        share_split: The share of the stored elements that tensor parallelism splits: linear layers
            of the blocks, and the vocabulary.
    """

    def __init__(self, config: RunConfig, source: Path | str) -> None:
        """Build a run's model: that in a folder, or an OPT of the name of a shape."""
        dtype = DTYPES[config.model.dtype]
        model: Any
        if isinstance(source, str):
            model = build_on_meta(opt_config(source), dtype)
        else:
            model = build_model(source, dtype)
        layout = find_blocks(model)
        blocks: Any = model.get_submodule(layout.path)
        decoder = model.config.get_text_config()
        self.class_name = type(model).__name__
        self.itemsize: int = dtype.itemsize
        self.num_blocks = layout.num_blocks
        self.num_dropped = make_layer_policy(config.zo, layout.num_blocks).num_dropped
        self.hidden_width: int = decoder.hidden_size
        self.vocabulary_size: int = decoder.vocab_size
        matrices = [weight for weight in blocks[0].parameters() if weight.dim() > 1]
        self.largest_matrix: int = max(weight.numel() for weight in matrices)
        # The longest sides are those of feed-forward layers, which have two or, with a gate, three
        # matrices. All but the last return as many activations. While it runs, there are also the
        # outputs of both copies, joined, and a sum with a float32 bias.
        sides = [max(weight.shape[-2:]) for weight in matrices]
        self.inner_width: int = (sides.count(max(sides)) + 1) * max(sides)
        self.num_heads = 1
        self.cached_width = 2 * self.hidden_width
        with suppress(RuntimeError):  # heads of Gemma 4 differ by layer
            self.num_heads, head_width = key_value_shape(decoder)
            self.cached_width = 2 * self.num_heads * head_width
        quantized = quantized_matrices(model, layout)
        adapter = make_adapter(config.peft)
        if adapter is not None:
            adapter.attach(model, layout)
        part = trained_part(config.zo)
        freeze_all_but(part, model, layout)
        self.head = self.vocabulary_size * self.hidden_width
        if part != "all" or adapter is not None:
            self.head = 0
        self.num_parameters: int = sum(weight.numel() for weight in model.parameters())
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.num_trained: int = sum(weight.numel() for weight in trained)
        trained = [weight for weight in blocks.parameters() if weight.requires_grad]
        self.perturbed: int = sum(weight.numel() for weight in trained)
        if config.zo.noise_rank:
            self.perturbed = config.zo.noise_rank * sum(sum(weight.shape) for weight in trained)
        if config.model.bits:  # from here on, the sizes of these matrices are those of their codes
            quantize_parameters(model, quantized, config.model.bits, 1)
        self.num_codes = num_trained_codes(model)
        self.stored: list[int] = [weight.numel() for weight in model.parameters()]
        self.parts = gather_sizes(model, layout)
        linear_layers = [module for module in blocks.modules() if isinstance(module, nn.Linear)]
        split = {module.weight for module in (*linear_layers, *(vocabulary_modules(model) or ()))}
        self.stored_bytes: int = sum(self.stored) * self.itemsize
        self.share_split = sum(matrix.numel() for matrix in split) / sum(self.stored)


class Plan:
    """The memory and the messages of a rank of a run, whose ranks may not be here.

    Attributes:
        config: The run.
        memory: The bytes at the peak on the device of rank 0, by the names of the terms above.
        in_host: The bytes of weights that a rank offloads to the host's memory.
        snapshot: The bytes of a snapshot on the disk.
    """

    def __init__(
        self,
        config: RunConfig,
        model: ModelSizes,
        inputs: InputSizes,
        num_ranks: int,
        on_gpu: bool = True,
    ) -> None:
        """Compute the terms. UserError: the DeepSpeed JSON does not fit the other keys.

        Args:
            config: The run.
            model: The sizes of its whole model.
            inputs: The sizes of its largest forward passes.
            num_ranks: Number of ranks.
            on_gpu: Whether each rank has a GPU; otherwise the ranks compute on CPUs.
        """
        self.config = config
        self.model = model
        self.inputs = inputs
        self.num_ranks = num_ranks
        self.on_gpu = on_gpu
        ds_config = ds_config_of(config, num_ranks)
        self._split = tensor_parallel_size(ds_config)
        self._num_shards = config.partition_size or num_ranks
        if self._split > 1:
            self._num_shards = 1
        # A CPU has no other memory to offload to.
        self._is_offloaded = on_gpu and offloads_weights(ds_config)
        # The part of a weight that tensor parallelism leaves to a rank, on average.
        self._part = 1 - model.share_split * (1 - 1 / self._split)
        low_bits = 0
        if config.zo.update_precision == "fp32_master" and model.itemsize < _FP32:
            low_bits = _LOW_BITS * (model.num_trained - model.num_codes)
        copies = self._copies()
        activations = max(self._activations(), self._logits() - copies)
        gathered = self._gathered()
        reserve = GPU_RESERVE if on_gpu else CPU_RESERVE
        of_rank = self._part / self._num_shards
        if config.peft.kind == "none":
            snapshot = (1 + of_rank) * max(model.stored) * model.itemsize
            if not on_gpu:
                snapshot += min(model.stored_bytes, MAX_FILE_BYTES)
            reserve += max(0, snapshot - gathered - copies - activations)
        weights = gathered
        if not self._is_offloaded:
            weights += (model.stored_bytes + low_bits) * of_rank
        self.memory = {
            "weights": weights,
            "copies": copies,
            "activations": activations,
            "reserve": reserve,
        }
        self.peak = sum(self.memory.values())
        self.snapshot = model.num_parameters * model.itemsize + low_bits + model.num_codes
        if config.peft.kind != "none":
            self.snapshot = model.num_trained * model.itemsize + low_bits
        self.in_host = 0.0
        if self._is_offloaded:
            # torch rounds each block of pinned memory up to a power of two
            # (CachingHostAllocator.h, 2.13). DeepSpeed pins one block for each parameter.
            shards = [math.ceil(size / self._num_shards) * model.itemsize for size in model.stored]
            pinned = sum(1 << (size - 1).bit_length() for size in shards)
            self.in_host = pinned + low_bits / self._num_shards

    def needs(self) -> str:
        """Return the peak of a rank, and what it takes of its host."""
        of_host = f" and {self.in_host / GIB:.2f} GiB of the host's memory" if self.in_host else ""
        return f"{self.peak / GIB:.2f} GiB{of_host}"

    def _gathered(self) -> float:
        """Return the bytes of weights of other ranks, or of the host, that a pass gathers."""
        if self._num_shards == 1 and not self._is_offloaded:
            return 0
        parts = self.model.parts
        num_ahead = 3 if self.on_gpu else 2
        # While the tied weights are gathered, there is also the message that brings them.
        gathered = parts.tied + max(num_ahead * parts.largest, parts.tied)
        return float(gathered * self.model.itemsize)

    def _copies(self) -> float:
        """Return the bytes of perturbed weights, or of all vectors of a step, and dequantized."""
        model = self.model
        config = self.config
        kept = 1 - model.num_dropped / model.num_blocks
        perturbed = model.perturbed * kept + model.head
        num_copies = 1
        if config.zo.noise_rank:
            num_copies = num_directions(config)
        elif not self.inputs.trains_on_answers:
            perturbed = model.perturbed / model.num_blocks
            num_copies = min(probes_per_pass(config.zo), COPIES_AT_ONCE)
        dequantized = model.largest_matrix if config.model.bits else 0
        if model.num_codes and not config.zo.noise_rank:  # a block's, of which the copies are made
            dequantized = model.num_codes // model.num_blocks
        numbers = num_copies * perturbed + dequantized
        return float(numbers * model.itemsize * self._part)

    def _num_rows(self) -> tuple[int, float]:
        """Return the rows that an evaluation scores in a pass, and that training runs."""
        train = self.config.train
        num_copies = probes_per_pass(self.config.zo)
        if self.inputs.trains_on_answers:  # that are drawn for prompts
            num_copies = num_copies if self.config.zo.noise_rank else 1
            num_copies *= self.config.generation.num_samples
        rows = train.micro_batch_size * self.inputs.rows * num_copies
        return train.eval_batch_size, rows

    def _activations(self) -> float:
        """Return the bytes of the larger pass, of training or of a score."""
        model = self.model
        inputs = self.inputs
        num_scored, num_trained = self._num_rows()
        rows = max(num_scored, num_trained)
        width = _HIDDEN_STATES * model.hidden_width + model.inner_width / self._split
        numbers = rows * inputs.length * width
        if inputs.new_tokens:
            num_written = rows if inputs.trains_on_answers else num_scored
            num_tokens = num_written * (inputs.length + inputs.new_tokens)
            numbers += num_tokens * model.num_blocks * model.cached_width / self._split
        return numbers * model.itemsize

    def _logits(self) -> float:
        """Return the bytes of logits, of two float32 tensors of the loss, and of perturbed heads.

        They are there after the blocks have run.
        """
        model = self.model
        train = self.config.train
        num_examples = max(COPIES_AT_ONCE * train.micro_batch_size, train.eval_batch_size)
        num_rows = num_examples * self.inputs.targets
        if num_rows == 0:
            return 0
        heads = COPIES_AT_ONCE * model.head * self._part
        numbers = num_rows * model.vocabulary_size + heads
        reduced = 2 * _FP32 * TARGETS_AT_ONCE * model.vocabulary_size
        return float(numbers * model.itemsize + reduced)

    def received(self) -> float:
        """Return the bytes that a rank receives in a step.

        Under ZeRO-3, each forward pass gathers the weights that the rank does not store:

            passes of a rank x parameters x b x (R - 1) / R

        If N ranks split each weight, a block sums two activations of each token by an all-reduce,
        and the embedding one more. A ring sends each number twice, except for the rank's own part:

            (2 x blocks + 1) x tokens x width x b x 2 x (N - 1) / N

        Logits are left out because they are much smaller. Where tokens are assumed, so is this.
        """
        model = self.model
        # A rank has one pass at least.
        num_passes_of_rank = max(1, num_passes(self.config) * self._split / self.num_ranks)
        if self._split == 1:
            return num_passes_of_rank * model.stored_bytes * (1 - 1 / self._num_shards)
        num_tokens = self._num_rows()[1] * self.inputs.mean_length
        summed = (2 * model.num_blocks + 1) * num_tokens * model.hidden_width * model.itemsize
        return num_passes_of_rank * summed * 2 * (1 - 1 / self._split)

    def ways(self, gpu_bytes: float) -> list[tuple[str, Plan]]:
        """Return the ways to share the weights: the keys of each, and the run with them.

        The ways are ZeRO-3 among `partition_size` ranks, and tensor parallelism; a part of all
        ranks then holds the model. Each has its largest micro-batch that fits. Those that fit GPUs
        of so many bytes come first, and of them those that receive least. If none fits, the weights
        in the memory of the hosts come first.
        """
        sizes = [size for size in range(1, self.num_ranks + 1) if self.num_ranks % size == 0]
        others = " tensor_parallel=1" if self._split > 1 else ""
        words = [f"partition_size={size}{others}" for size in sizes]
        takes_split = not self.model.class_name.startswith(_UNSPLIT)
        if takes_split and self.config.peft.kind != "prefix":
            others = " deepspeed=null" if self._is_offloaded else ""
            split = [size for size in sizes[1:] if self.model.num_heads % size == 0]
            words += [f"tensor_parallel={size} partition_size=null{others}" for size in split]
        found = [way for each in words for way in self._largest_fitting(each, gpu_bytes)]
        found.sort(key=lambda way: (way[1].peak > gpu_bytes, way[1].received()))
        if found[0][1].peak > gpu_bytes:
            offload = f"{words[len(sizes) - 1]} deepspeed=zero3_cpu_offload"
            found = self._largest_fitting(offload, gpu_bytes) + found
        return found

    def _largest_fitting(self, keys: str, gpu_bytes: float) -> list[tuple[str, Plan]]:
        """Return a way with its largest micro-batch that fits, or of one example.

        None: the ranks have no equal shares of a step.
        """
        train = self.config.train
        even = []
        for size in range(train.batch_size, 0, -1):
            # An evaluation then needs no more than training, whose passes have several copies.
            num_scored = min(train.eval_batch_size, size * probes_per_pass(self.config.zo))
            way = f"train.micro_batch_size={size} train.eval_batch_size={num_scored} {keys}"
            config = config_from_dict(self.config.model_dump(), "the plan", way.split())
            plan = Plan(config, self.model, self.inputs, self.num_ranks, self.on_gpu)
            is_even = num_passes(config) % (self.num_ranks // plan._split) == 0
            if train.batch_size % size == 0 and is_even:
                even.append((way, plan))
        fitting = [way for way in even if way[1].peak <= gpu_bytes]
        return (fitting or even[-1:])[:1]
