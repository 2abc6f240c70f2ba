"""The memory of one rank as a formula. Measured peaks hold it to 20 % (tests/unit/test_memory_plan.py).

With b bytes a weight, R ranks that share the weights, and c copies of the batch a pass (zo.probes_per_pass):

    shards       b x parameters / R
    low bits     2 x trained / R, if zo.update_precision is fp32_master and b is 2
    gathered     b x (2 x largest part + tied weights): the block that runs, and the message with the next
                 one; on a GPU 1 part more, because the host runs ahead of it
    copies       b x min(c, 2) x largest perturbed module; on a GPU, b x c x perturbed weights of a block, if
                 c is at most 2 and no weights are offloaded. A run that trains on answers keeps all
                 copies while it writes: b x c x perturbed weights
    activations  b x c x tokens x activation width; keys and values of written tokens
    logits       (b c + 8) x answers' tokens x vocabulary
    reserve      what the libraries need
    snapshot     of rank 0: a file of 1 GiB (on a GPU, in the host's memory) and 1 + 1/R times the largest
                 parameter, so far as the four parts of a forward pass leave no room for it

Each part is at its own maximum, although not all of them are at the same moment. On CPUs, loading 16-bit
weights may need more. This is not for AdamW, whose memory depends on DeepSpeed's buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from torch import nn
from transformers import OPTConfig

from lezo_ds.checkpoints.checkpoint import DTYPES, build_on_meta, load_model_config
from lezo_ds.checkpoints.snapshots import MAX_FILE_BYTES
from lezo_ds.config import (
    TRAINED,
    ZEROTH_ORDER,
    RunConfig,
    copies_per_pass,
    make_layer_policy,
    num_passes,
)
from lezo_ds.config.deepspeed import ds_config_of, tensor_parallel_size
from lezo_ds.data.batches import PAD_MULTIPLE
from lezo_ds.data.task_data import TaskData
from lezo_ds.forward.adapters import make_adapter
from lezo_ds.forward.blocks import PartSizes, find_blocks, freeze_outside, part_sizes
from lezo_ds.forward.perturbed_forward import COPIES_AT_ONCE
from lezo_ds.sharding.tensor_parallel import vocabulary_modules

GIB = 1 << 30
CPU_RESERVE = int(
    0.53 * GIB
)  # measured: Python with torch, transformers, datasets, DeepSpeed and gloo
GPU_RESERVE = int(
    2.0 * GIB
)  # assumed: CUDA's context, NCCL's buffers, what the allocator cannot use
_LOW_BITS, _FP32 = 2, 4
_HIDDEN_STATES = (
    5  # held while a block runs: both embeddings, the block's input, the residual, the norm
)
_WIDE_OUTPUTS = (
    2  # held besides a block's widest outputs: both copies joined, and a float32 bias added
)

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


@dataclass(frozen=True)
class ModelSizes:
    """A model with the adapter that is trained on it, if there is one. Sizes are numbers of elements."""

    class_name: str
    blocks_path: str
    num_blocks: int
    parameters: tuple[int, ...]  # a tied parameter appears once
    num_trained: int
    num_dropped: int  # blocks of a step
    parts: PartSizes
    largest_perturbed: (
        int  # of the modules whose copies are made; rows of embeddings are perturbed alone
    )
    blocks_trained: int
    heads: int  # divisors of this number can split the heads of queries, keys and values
    splittable: (
        int  # of what tensor parallelism splits: the blocks' linear layers, and the vocabulary
    )
    has_split_vocabulary: bool  # with tensor parallelism
    hidden_width: int
    head: int
    activation_width: int  # of one token while a block runs
    cached_width: int  # keys and values of one token in one block
    vocabulary_size: int
    max_length: int | None
    itemsize: int

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters)


@dataclass(frozen=True)
class InputSizes:
    """Sizes of the largest forward passes."""

    length: int  # tokens of the longest input, padding included
    mean_length: float = 0  # tokens of a training example; 0 if it is not known
    answer_tokens: int = 1  # of the longest answer whose probability is computed
    num_labels: int | None = None  # vocabulary entries that training compares; None for all of them
    new_tokens: int = 0  # that the model writes after a prompt in an evaluation
    trains_on_answers: bool = False  # whether the model writes answers in training, too


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of one rank in bytes: `parts` by the names above on its device, and what is offloaded."""

    parts: Mapping[str, int]
    host: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts.items())
        host = f"; {self.host / GIB:.2f} GiB of the host's memory" if self.host else ""
        return f"{self.total / GIB:.2f} GiB: {parts}{host}"


def opt_config(shape: str) -> OPTConfig:
    blocks, width, heads = OPT_SHAPES[shape]
    sizes = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 4 * width}
    return OPTConfig(**sizes, num_hidden_layers=blocks, num_attention_heads=heads)


def model_sizes(config: RunConfig, source: Path | str) -> ModelSizes:
    """Build a run's model from a directory or the name of an OPT shape, without weights; return its sizes."""
    dtype = DTYPES[config.model.dtype]
    shape = opt_config(source) if isinstance(source, str) else load_model_config(source)
    model: Any = build_on_meta(shape, dtype)
    layout = find_blocks(model)
    adapter = make_adapter(config.peft if config.method in TRAINED else None)
    if adapter is not None:
        adapter.attach(model, layout)
    head, blocks, num_dropped = model.get_output_embeddings(), model.get_submodule(layout.path), 0
    if config.method in ZEROTH_ORDER:
        if config.zo.only_blocks:
            freeze_outside(model, layout)
        has_more = _trained(model) > _trained(blocks)
        num_dropped = make_layer_policy(
            config.zo, layout.num_blocks, trains_outside=has_more
        ).num_dropped
    tables = [module for module in model.modules() if type(module).forward is nn.Embedding.forward]
    copied = [module for module in model.modules() if module is not head and module not in tables]
    widths = [_output_width(module) for module in blocks[0].modules()]
    num_wide = _WIDE_OUTPUTS + widths.count(
        max(widths)
    )  # a gated feed-forward layer has two widest outputs
    text = model.config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None) or 1
    num_cached = getattr(text, "num_key_value_heads", None) or num_heads
    vocabulary = vocabulary_modules(model) or ()
    split = [*(m for m in blocks.modules() if isinstance(m, nn.Linear)), *vocabulary]
    return ModelSizes(
        class_name=type(model).__name__,
        blocks_path=layout.path,
        num_blocks=layout.num_blocks,
        parameters=tuple(parameter.numel() for parameter in model.parameters()),
        num_trained=_trained(model),
        num_dropped=num_dropped,
        parts=part_sizes(model, layout),
        largest_perturbed=max(_trained(module, recurse=False) for module in copied),
        blocks_trained=_trained(blocks),
        heads=math.gcd(num_heads, num_cached),
        splittable=sum(weight.numel() for weight in {module.weight for module in split}),
        has_split_vocabulary=bool(vocabulary),
        hidden_width=text.hidden_size,
        head=_trained(head) if head else 0,
        activation_width=_HIDDEN_STATES * text.hidden_size + num_wide * max(widths),
        cached_width=2
        * num_cached
        * (getattr(text, "head_dim", None) or text.hidden_size // num_heads),
        vocabulary_size=text.vocab_size,
        max_length=getattr(text, "max_position_embeddings", None),
        itemsize=dtype.itemsize,
    )


def measured_inputs(config: RunConfig, data: TaskData) -> InputSizes:
    """Return the sizes of a run's longest inputs, from its examples."""
    splits = (
        [data.train, data.dev, data.test] if config.method in TRAINED else [data.dev, data.test]
    )
    examples = [example for split in splits for example in split.encoded]
    lengths = [example.num_tokens for example in examples]
    lengths += [len(ids) for split in splits for ids in split.prompts]
    selection = data.objective_batch(data.train, [0]).selection
    vocabulary = None if selection is None else selection.vocabulary
    return InputSizes(
        length=-(-max(lengths) // PAD_MULTIPLE) * PAD_MULTIPLE,
        mean_length=mean(example.num_tokens for example in data.train.encoded or data.test.encoded),
        answer_tokens=max(
            (length for example in examples for length in example.option_lengths), default=1
        ),
        num_labels=None if vocabulary is None else len(vocabulary),
        new_tokens=0 if data.generation is None else data.generation.max_new_tokens,
        trains_on_answers=data.objective.reads_answers,
    )


def rank_memory(
    config: RunConfig,
    model: ModelSizes,
    inputs: InputSizes,
    *,
    world_size: int,
    on_gpu: bool = True,
) -> RankMemory:
    ds_config, full = ds_config_of(config, world_size), model
    size = tensor_parallel_size(ds_config)
    if size > 1:
        model = split_sizes(model, size)
    zero = ds_config["zero_optimization"]
    offload = zero.get("offload_param") or {}
    device = offload.get("device", "none")
    is_offloaded = device != "none" and on_gpu
    num_shards = 1 if size > 1 else config.partition_size or world_size
    shards = model.num_parameters * model.itemsize // num_shards
    keeps_low_bits = config.method in ZEROTH_ORDER and config.zo.update_precision == "fp32_master"
    low_bits = (
        _LOW_BITS * model.num_trained // num_shards
        if keeps_low_bits and model.itemsize < _FP32
        else 0
    )
    if device == "nvme":
        shards = (
            int(offload.get("buffer_count", 5))
            * int(offload.get("buffer_size", 10**8))
            * model.itemsize
        )
    elif is_offloaded and offload.get("pin_memory"):
        # torch rounds each block of pinned memory up to a power of two (CachingHostAllocator.h, 2.13).
        sizes = [-(-numel // num_shards) * model.itemsize for numel in model.parameters]
        shards = sum(1 << (size - 1).bit_length() for size in sizes)
    largest, tied = model.parts
    gathered = max(tied + (3 if on_gpu else 2) * largest, 2 * tied) * model.itemsize
    parts = {
        "shards": 0 if is_offloaded else shards,
        "low bits": 0 if is_offloaded else low_bits,
        "reserve": GPU_RESERVE if on_gpu else CPU_RESERVE,
        "gathered": gathered if num_shards > 1 or is_offloaded else 0,
        "copies": _copies(config, model, inputs, at_once=on_gpu and not is_offloaded),
        "activations": _activations(config, model, inputs),
        "logits": _logits(config, model, inputs),
    }
    in_pass = sum(parts[name] for name in ("gathered", "copies", "activations", "logits"))
    parts["snapshot"] = max(0, _snapshot(config, full, num_shards * size, on_gpu=on_gpu) - in_pass)
    used = {name: size for name, size in parts.items() if size}
    return RankMemory(used, host=shards + low_bits if is_offloaded else 0)


def split_sizes(model: ModelSizes, size: int) -> ModelSizes:
    """Return the sizes of what a rank has of a model that `size` ranks split."""
    kept = 1 - model.splittable / model.num_parameters * (1 - 1 / size)
    hidden = _HIDDEN_STATES * model.hidden_width
    return replace(
        model,
        parameters=(round(model.num_parameters * kept),),
        num_trained=round(model.num_trained * kept),
        largest_perturbed=model.largest_perturbed // size,
        head=model.head // (size if model.has_split_vocabulary else 1),
        blocks_trained=model.blocks_trained // size,
        activation_width=hidden + (model.activation_width - hidden) // size,
        cached_width=model.cached_width // size,
    )


def received_bytes(
    config: RunConfig, model: ModelSizes, inputs: InputSizes, *, ranks: int, split: int
) -> int:
    """Return what a rank receives in a step: weights under ZeRO-3, activations if `split` ranks split them.

    Each pass gathers all weights of which the rank has no part. For each token, a split block all-reduces two
    activations in a ring, and a split embedding one more. Logits are left out because they are much smaller.
    """
    if split == 1:
        shared = config.partition_size or ranks
        passes = max(
            1, num_passes(config) / ranks
        )  # micro-batches may be smaller than for split weights
        return round(passes * model.num_parameters * model.itemsize * (shared - 1) / shared)
    rows = (
        num_passes(config)
        * copies_per_pass(config)
        * config.train.micro_batch_size
        / (ranks // split)
    )
    sums = (
        (2 * model.num_blocks + model.has_split_vocabulary)
        * rows
        * (inputs.mean_length or inputs.length)
    )
    return round(sums * model.hidden_width * model.itemsize * 2 * (split - 1) / split)


def _copies(config: RunConfig, model: ModelSizes, inputs: InputSizes, *, at_once: bool) -> int:
    if config.method not in ZEROTH_ORDER:
        return 0
    if inputs.trains_on_answers:
        active = model.blocks_trained * (1 - model.num_dropped / model.num_blocks) + model.head
        return int(copies_per_pass(config) * active) * model.itemsize
    head = model.head if inputs.num_labels is None else 0
    num_copies = min(copies_per_pass(config), COPIES_AT_ONCE)
    copies_block = at_once and num_copies == copies_per_pass(config)
    block = model.blocks_trained // model.num_blocks if copies_block else 0
    return num_copies * max(model.largest_perturbed, block, head) * model.itemsize


def _activations(config: RunConfig, model: ModelSizes, inputs: InputSizes) -> int:
    train_rows = (
        copies_per_pass(config) * config.train.micro_batch_size if config.method in TRAINED else 0
    )
    if inputs.trains_on_answers:
        train_rows *= config.generation.num_samples
    eval_rows = config.train.eval_batch_size
    size = max(train_rows, eval_rows) * inputs.length * model.activation_width
    if inputs.new_tokens:
        rows = max(train_rows, eval_rows) if inputs.trains_on_answers else eval_rows
        size += rows * (inputs.length + inputs.new_tokens) * model.num_blocks * model.cached_width
    return size * model.itemsize


def _logits(config: RunConfig, model: ModelSizes, inputs: InputSizes) -> int:
    train, copies = config.train, copies_per_pass(config)
    loss = 2 * _FP32  # the loss makes two float32 tensors of the logits, one copy at a time
    rows = train.micro_batch_size * (
        config.generation.num_samples if inputs.trains_on_answers else 1
    )
    training = rows * (copies * model.itemsize + loss)
    training *= inputs.num_labels or model.vocabulary_size
    scoring = train.eval_batch_size * (model.itemsize + loss) * model.vocabulary_size
    return inputs.answer_tokens * max(training if config.method in TRAINED else 0, scoring)


def _snapshot(config: RunConfig, model: ModelSizes, num_shards: int, *, on_gpu: bool) -> int:
    if config.method not in TRAINED:
        return 0
    sizes = model.parameters if config.peft.kind == "none" else (model.num_trained,)
    largest, total = max(sizes) * model.itemsize, sum(sizes) * model.itemsize
    file = 0 if on_gpu else max(largest, min(total, MAX_FILE_BYTES))
    return file + largest + largest // num_shards


def _trained(module: nn.Module, recurse: bool = True) -> int:
    return sum(p.numel() for p in module.parameters(recurse) if p.requires_grad)


def _output_width(module: nn.Module) -> int:
    # The bias tells the width, too: GPT-2 stores its weights transposed, but always with a bias.
    own = list(module.parameters(recurse=False))
    weights = [parameter for parameter in own if parameter.dim() == 2]
    biases = [parameter.numel() for parameter in own if parameter.dim() == 1]
    return (biases or [weights[0].shape[0]])[0] if weights else 0
