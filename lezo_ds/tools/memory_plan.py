"""The memory of one rank as a formula, and the disk space of a run.

Measured peaks are within 20 % of it (tests/unit/test_memory_plan.py).

With b bytes a weight, R ranks that share the weights by ZeRO-3, and c copies of the batch in a
forward pass (zo.probes_per_pass), a rank has

    shards       its part of all parameters:
                     b x parameters / R
    low bits     the low bits of its part of trained weights, if zo.update_precision is
                 fp32_master and b is 2:
                     2 x trained / R
    reserve      what the libraries need: measured on a CPU, assumed on a GPU
    gathered     if R > 1, the block that runs, the next one, and the tied weights, which stay for
                 the whole pass. On a GPU one block more, because the host runs ahead of it:
                     b x (2 or 3 x largest part + tied weights)
    dequantized  with model.bits, the matrix of the module that runs, in model.dtype. In all other
                 terms, such matrices count as they are stored:
                     b x largest matrix of the blocks
    copies       the perturbed weights of the module that runs, at most 2 copies at a time:
                     b x min(c, 2) x largest perturbed module
                 On a GPU, if c is at most 2 and no weights are offloaded, those of a whole block.
                 A run that trains on answers keeps all copies while it writes them:
                     b x c x perturbed weights
    activations  of the block that runs; and, while answers are written, keys and values of all
                 blocks:
                     b x c x tokens x activation width
                     b x c x (tokens + new tokens) x blocks x cached width
    logits       of the tokens of answers, at most 2 copies at a time, and what their
                 log-probabilities take, 128 tokens at a time:
                     (b x min(c, 2) x tokens of answers + 8 x 128) x vocabulary
                 A function of logits reads those of all copies, and makes two float32 tensors:
                     (b c + 8) x tokens of answers x vocabulary
                 With them, there are copies of the head. The blocks have run before, so only what
                 exceeds their copies + activations counts, unless answers are written
    snapshot     on rank 0, which writes one file after the other: a file of 1 GiB (on a GPU, in
                 the host's memory), and the largest parameter with rank 0's part of it. A forward
                 pass and a snapshot do not happen at the same time, so only what exceeds
                 gathered + copies + activations + logits counts

Each term is at its own maximum, although not all of them are at the same moment. On CPUs, loading
16-bit weights may need more. AdamW is left out: its memory depends on DeepSpeed's buckets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lezo_ds.checkpoints.checkpoint import DTYPES
from lezo_ds.checkpoints.snapshots import MAX_FILE_BYTES
from lezo_ds.config import (
    TRAINED,
    ZEROTH_ORDER,
    RunConfig,
    copies_per_pass,
    eval_every,
    num_passes,
)
from lezo_ds.config.deepspeed import ds_config_of, offloads_weights, tensor_parallel_size
from lezo_ds.forward.perturber import PROBES_AT_ONCE
from lezo_ds.forward.wrappers import TARGETS_AT_ONCE
from lezo_ds.tools.sizes import HIDDEN_STATES, InputSizes, ModelSizes

GIB = 1 << 30
# What CUDA finds, in GiB, in a card by the gigabytes that it is sold with.
_CARDS: Mapping[float, float] = {
    16: 14.7,
    24: 22.5,
    32: 31.3,
    40: 39.4,
    48: 44.4,
    80: 79.1,
    96: 94.9,
    141: 139.7,
}
# Measured: the peak of a run with a model of 10 MB, so Python with all libraries and the data.
CPU_RESERVE = int(0.68 * GIB)
# Assumed: CUDA's context, NCCL's buffers, and what the allocator cannot use.
GPU_RESERVE = int(2.0 * GIB)
# Bytes of the low bits of a 16-bit weight, and of a float32 number.
_LOW_BITS = 2
_FP32 = 4
# Bytes of a trained parameter in AdamW's checkpoint: a float32 weight and two float32 moments.
_ADAMW = 12


def memory_of_card(size: float) -> int:
    """Return the bytes of a GPU: of a card that is sold with so many gigabytes, or else of GiB.

    Cards of one size differ by some percent. The smallest of them counts, such as L4 and A10G,
    which keep a part of their 24 GB for the correction of errors.
    """
    return int(_CARDS.get(size, size) * GIB)


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of one rank.

    Attributes:
        parts: Bytes on the rank's device by the names of the terms above; those of 0 are left out.
        host: Bytes of weights that are offloaded to the host's memory.
    """

    parts: Mapping[str, int]
    host: int

    @property
    def total(self) -> int:
        """Bytes on the rank's device."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        terms = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts.items())
        line = f"{self.total / GIB:.2f} GiB: {terms}"
        if self.host:
            line += f"; {self.host / GIB:.2f} GiB of the host's memory"
        return line


def rank_memory(
    config: RunConfig,
    model: ModelSizes,
    inputs: InputSizes,
    *,
    world_size: int,
    on_gpu: bool = True,
) -> RankMemory:
    """Return the peak memory of the rank that needs most, rank 0.

    Args:
        config: The run.
        model: The sizes of its whole model.
        inputs: The sizes of its largest forward passes.
        world_size: Number of ranks.
        on_gpu: Whether each rank has a GPU; otherwise the ranks compute on CPUs.

    Raises:
        UserError: The run's DeepSpeed JSON does not fit its other settings.
    """
    ds_config = ds_config_of(config, world_size)
    split = tensor_parallel_size(ds_config)
    if split > 1:
        own_model = split_sizes(model, split)
        num_shards = 1
    else:
        own_model = model
        num_shards = config.partition_size or world_size
    offload = ds_config["zero_optimization"].get("offload_param") or {}
    # A CPU has no other memory to offload to.
    is_offloaded = on_gpu and offloads_weights(ds_config)
    weights = {"shards": _shards(own_model, num_shards, offload, is_offloaded=is_offloaded)}
    keeps_low_bits = config.zo.update_precision == "fp32_master" and model.itemsize < _FP32
    if config.method in ZEROTH_ORDER and keeps_low_bits:
        weights["low bits"] = _LOW_BITS * own_model.num_trained // num_shards
    in_pass = {}
    if num_shards > 1 or is_offloaded:
        largest, tied = own_model.parts
        num_largest = 3 if on_gpu else 2
        # While the tied weights are gathered, there is also the message that brings them.
        num_gathered = max(tied + num_largest * largest, 2 * tied)
        in_pass["gathered"] = num_gathered * model.itemsize
    whole_blocks = on_gpu and not is_offloaded
    in_pass["dequantized"] = own_model.dequantized * model.itemsize
    in_pass["copies"] = _copies(config, own_model, inputs, whole_blocks=whole_blocks)
    in_pass |= _activations(config, own_model, inputs)
    if not inputs.new_tokens:  # otherwise keys and values stay while the head runs
        of_blocks = in_pass["copies"] + in_pass["activations"]
        of_head = in_pass["logits"]
        if config.method in ZEROTH_ORDER and inputs.num_labels is None:
            num_copies = min(copies_per_pass(config), PROBES_AT_ONCE)
            of_head += num_copies * own_model.head * model.itemsize
        in_pass["logits"] = max(0, of_head - of_blocks)
    snapshot = _snapshot(config, model, num_shards * split, on_gpu=on_gpu)
    terms = {
        "reserve": GPU_RESERVE if on_gpu else CPU_RESERVE,
        **in_pass,
        "snapshot": max(0, snapshot - sum(in_pass.values())),
    }
    host = 0
    if is_offloaded:
        host = sum(weights.values())
    else:
        terms = {**weights, **terms}
    return RankMemory({name: size for name, size in terms.items() if size}, host)


def split_sizes(model: ModelSizes, size: int) -> ModelSizes:
    """Return the sizes of what one rank has of a model that `size` ranks split."""
    splittable_share = model.splittable / model.num_stored
    own_share = 1 - splittable_share + splittable_share / size
    # A rank has the activations between layers whole, and its part of those inside a layer.
    whole_width = HIDDEN_STATES * model.hidden_width
    inside_width = model.activation_width - whole_width
    return replace(
        model,
        stored=(round(model.num_stored * own_share),),
        dequantized=model.dequantized // size,
        num_trained=round(model.num_trained * own_share),
        largest_perturbed=model.largest_perturbed // size,
        head=model.head // size if model.has_split_vocabulary else model.head,
        blocks_perturbed=model.blocks_perturbed // size,
        activation_width=whole_width + inside_width // size,
        cached_width=model.cached_width // size,
    )


def received_bytes(
    config: RunConfig, model: ModelSizes, inputs: InputSizes, *, ranks: int, split: int
) -> int:
    """Return the bytes that a rank receives in a step.

    Under ZeRO-3 (`split` is 1), each forward pass gathers the weights that the rank does not store:

        passes of a rank x parameters x b x (R - 1) / R

    If `split` ranks split each weight, a block sums two activations of each token by an all-reduce,
    and a split embedding one more. A ring sends each number twice, except for the rank's own part:

        (2 x blocks + 1) x tokens x width x b x 2 x (split - 1) / split

    Logits are left out because they are much smaller.
    """
    if split == 1:
        sharing = config.partition_size or ranks
        # Micro-batches may be smaller than those of split weights: a rank has one pass at least.
        passes_of_rank = max(1, num_passes(config) / ranks)
        weight_bytes = model.num_stored * model.itemsize
        return round(passes_of_rank * weight_bytes * (sharing - 1) / sharing)
    num_groups = ranks // split
    num_examples = num_passes(config) * copies_per_pass(config) * config.train.micro_batch_size
    tokens = num_examples / num_groups * inputs.rows * (inputs.mean_length or inputs.length)
    num_sums = 2 * model.num_blocks
    if model.has_split_vocabulary:
        num_sums += 1
    summed_bytes = num_sums * tokens * model.hidden_width * model.itemsize
    return round(summed_bytes * 2 * (split - 1) / split)


def _shards(
    model: ModelSizes, num_shards: int, offload: Mapping[str, Any], *, is_offloaded: bool
) -> int:
    """Return the bytes of a rank's part of the weights, wherever they are."""
    if is_offloaded and offload.get("pin_memory"):
        # torch rounds each block of pinned memory up to a power of two (CachingHostAllocator.h,
        # 2.13). DeepSpeed pins one block for each parameter.
        num_bytes = 0
        for numel in model.stored:
            shard_bytes = math.ceil(numel / num_shards) * model.itemsize
            num_bytes += 1 << (shard_bytes - 1).bit_length()
        return num_bytes
    return model.num_stored * model.itemsize // num_shards


def _copies(config: RunConfig, model: ModelSizes, inputs: InputSizes, *, whole_blocks: bool) -> int:
    """Return the bytes of perturbed weights of blocks, or while answers are written, of all.

    Directions of low rank perturb no copies: these are the bytes of their vectors.

    Args:
        config: The run.
        model: The sizes of what the rank has of the model.
        inputs: The sizes of the largest forward passes.
        whole_blocks: Whether all weights of a block are perturbed before it runs. This needs a
            forward pass with at most PROBES_AT_ONCE copies, too.
    """
    if config.method not in ZEROTH_ORDER:
        return 0
    num_copies = copies_per_pass(config)
    kept_share = 1 - model.num_dropped / model.num_blocks
    if config.zo.noise_rank:
        size = config.zo.examples_per_direction or config.train.batch_size
        num_groups = max(1, config.train.micro_batch_size // size)
        num_vectors = num_groups * min(config.zo.directions, num_copies)
        kept = model.largest_perturbed
        if inputs.trains_on_answers:
            kept = int(model.blocks_perturbed * kept_share)
        # They are drawn in float32.
        return num_vectors * (kept * model.itemsize + model.largest_perturbed * _FP32)
    if inputs.trains_on_answers:
        perturbed = model.blocks_perturbed * kept_share + model.head
        return int(num_copies * perturbed) * model.itemsize
    largest = model.largest_perturbed
    if inputs.new_tokens:
        largest = max(largest, model.head)
    if whole_blocks and num_copies <= PROBES_AT_ONCE:
        largest = max(largest, model.blocks_perturbed // model.num_blocks)
    return min(num_copies, PROBES_AT_ONCE) * largest * model.itemsize


def _activations(config: RunConfig, model: ModelSizes, inputs: InputSizes) -> dict[str, int]:
    """Return the bytes of activations and of logits in the largest pass.

    That is a pass of training or of an evaluation.
    """
    # An evaluation runs one copy, and compares all entries of the vocabulary.
    scored_rows = config.train.eval_batch_size
    largest_rows: float = scored_rows
    logits = _logits(model, inputs, scored_rows * inputs.answer_tokens, 1)
    if config.method in TRAINED:
        num_examples = config.train.micro_batch_size
        if inputs.trains_on_answers:  # that are drawn for prompts
            num_examples *= config.generation.num_samples
        num_copies = copies_per_pass(config)
        largest_rows = max(scored_rows, num_copies * num_examples * inputs.rows)
        # The logits of a few entries, one row for each example, take next to nothing.
        if inputs.num_labels is None:
            num_targets = math.ceil(num_examples * inputs.targets)
            logits = max(logits, _logits(model, inputs, num_targets, num_copies))
    size = largest_rows * inputs.length * model.activation_width
    if inputs.new_tokens:
        written_rows = largest_rows if inputs.trains_on_answers else scored_rows
        written_length = inputs.length + inputs.new_tokens
        size += written_rows * written_length * model.num_blocks * model.cached_width
    return {"activations": math.ceil(size * model.itemsize), "logits": logits}


def _logits(model: ModelSizes, inputs: InputSizes, num_targets: int, num_copies: int) -> int:
    """Return the bytes of a pass's logits, and of the float32 tensors that the loss makes."""
    if inputs.reads_logits:
        num_logits = num_targets * num_copies
        num_reduced = num_targets
    else:
        num_logits = num_targets * min(num_copies, PROBES_AT_ONCE)
        num_reduced = min(num_targets, TARGETS_AT_ONCE)
    return (num_logits * model.itemsize + num_reduced * 2 * _FP32) * model.vocabulary_size


def _snapshot(config: RunConfig, model: ModelSizes, num_shards: int, *, on_gpu: bool) -> int:
    """Return the bytes that rank 0 needs to write a snapshot.

    Args:
        config: The run.
        model: The sizes of the whole model.
        num_shards: Number of ranks that have a part of each parameter.
        on_gpu: Whether rank 0 computes on a GPU; the file's content is then in the host's memory.
    """
    if config.method not in TRAINED:
        return 0
    # With an adapter, a snapshot has only the adapter.
    sizes = model.stored if config.peft.kind == "none" else (model.num_trained,)
    largest_bytes = max(sizes) * model.itemsize
    total_bytes = sum(sizes) * model.itemsize
    num_bytes = largest_bytes + largest_bytes // num_shards
    if not on_gpu:
        num_bytes += max(largest_bytes, min(total_bytes, MAX_FILE_BYTES))
    return num_bytes


def snapshot_sizes(config: RunConfig, num_parameters: int, num_trained: int) -> list[int]:
    """Return the most snapshots and checkpoints that are on the disk at one time.

    That is while the last of them is written, before the oldest is removed.

    Args:
        config: of the run.
        num_parameters: number of the model's parameters.
        num_trained: number of those that are trained, which are all that an adapter's snapshot has.

    Returns:
        The bytes of each.
    """
    train = config.train
    if config.method not in TRAINED or train.steps is None:
        return []
    itemsize = DTYPES[config.model.dtype].itemsize
    num_stored = num_parameters if config.peft.kind == "none" else num_trained
    size = num_stored * itemsize
    is_master = config.zo.update_precision == "fp32_master"
    if config.method in ZEROTH_ORDER and is_master and itemsize == 2:
        size += _LOW_BITS * num_trained
    every = train.snapshot_every
    if every is None:
        every = eval_every(config)
    num_due = -(-train.steps // every) if every > 0 else 1
    num_kept = max(1, train.keep_snapshots)
    checkpoints = []
    if config.method == "adamw":
        num_kept += 1  # that of the best step
        checkpoints = [_ADAMW * num_trained] * 2
    return [size] * min(num_kept + 1, num_due) + checkpoints
