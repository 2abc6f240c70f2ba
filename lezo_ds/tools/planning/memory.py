"""The memory of one rank as a formula. Measured peaks hold it to 20 % (tests/ranks/test_memory_model.py).

With b bytes a weight, R ranks that share the weights, and c copies of the batch a pass (zo.probes_per_pass):

    shards           b x parameters / R
    low bits         2 x trained / R, if zo.update_precision is fp32_master and b is 2
    AdamW's states   (b + 12) x trained / R: gradients, fp32 weights, two moments; and its buckets
    gathered         b x (2 x largest part + tied weights): the block that runs, and the message with the next
                     one; on a GPU 1 part more, because the host runs ahead of it. Where DeepSpeed gathers
                     (AdamW, offloaded weights): b x (stage3_max_live_parameters + largest module)
    copies           b x min(c, 2) x largest perturbed module; on a GPU, b x c x perturbed weights of a block,
                     if c is at most 2 and no weights are offloaded; b x c x all perturbed blocks and the
                     head, if they are kept
    activations      b x c x tokens x activation width; keys and values of written tokens
    logits           (b c + 8) x answers' tokens x vocabulary
    reserve          what the libraries need

Each part is at its own maximum, although not all of them are at the same moment. No forward pass runs while
weights are loaded or AdamW takes its step, so only the larger of the two counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig, copies_per_pass
from lezo_ds.config.deepspeed import load_ds_config
from lezo_ds.forward.blocks import gathering_limits
from lezo_ds.forward.perturbed_forward import COPIES_AT_ONCE
from lezo_ds.tools.planning.inputs import InputSizes
from lezo_ds.tools.planning.model_sizes import ModelSizes

GIB = 1 << 30
CPU_RESERVE = int(0.53 * GIB)
"""Bytes of Python with torch, transformers, datasets and DeepSpeed, and of gloo, as measured."""

GPU_RESERVE = int(2.0 * GIB)
"""Bytes of CUDA's context, NCCL's buffers and memory that the allocator cannot use. Assumed, not measured."""

LOW_BITS_BYTES = 2
_FP32_BYTES = 4
_ADAMW_STATES = 3 * _FP32_BYTES  # DeepSpeed's fp32 copy of the weights, and two moments
_ADAMW_STEP = 3 * _FP32_BYTES  # fp32 gradients, and two temporaries of torch's AdamW
_SPLIT_BYTES = 18  # per element while low bits are split off: 16-bit and float32 values, three of integers
_MAX_LIVE, _REDUCE_BUCKET = 10**9, 5 * 10**8  # DeepSpeed's defaults, in elements
_NUM_BUFFERS, _BUFFER = 5, 10**8  # likewise, for shards on a disk


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of one rank in bytes.

    Attributes:
        parts: memory of the rank's device by the names above, without those of 0 bytes.
        host: shards and low bits that are offloaded to the host's memory.
        disk: shards that are offloaded to a disk.
    """

    parts: Mapping[str, int]
    host: int
    disk: int

    @property
    def total(self) -> int:
        """Bytes of the rank's device."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """Return the total and its parts in GiB, and what is not on the device."""
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts.items())
        elsewhere = {"the host's memory": self.host, "disk": self.disk}
        rest = "".join(f"; {size / GIB:.2f} GiB of {place}" for place, size in elsewhere.items() if size)
        return f"{self.total / GIB:.2f} GiB: {parts}{rest}"


def rank_memory(
    config: RunConfig,
    model: ModelSizes,
    inputs: InputSizes,
    *,
    world_size: int,
    on_gpu: bool = True,
) -> RankMemory:
    """Return the peak memory of each rank of a run.

    Args:
        config: configuration of the run.
        model: sizes of its model, with the adapter that the configuration asks for.
        inputs: sizes of its longest inputs.
        world_size: number of ranks.
        on_gpu: whether the ranks compute on GPUs; otherwise on CPUs.

    Raises:
        UserError: the DeepSpeed JSON cannot be used.
    """
    micro_batch_size = config.train.micro_batch_size
    ds_config = load_ds_config(config.deepspeed, config.model.dtype, world_size, micro_batch_size)
    zero = ds_config["zero_optimization"]
    offload = zero.get("offload_param", {})
    place = offload.get("device", "none")
    leaves_device = place != "none" and on_gpu
    is_offloaded = leaves_device or place == "nvme"
    num_shards = config.partition_size or world_size
    trained = model.num_trained // num_shards
    shards = in_memory = model.num_parameters * model.itemsize // num_shards
    low_bits = LOW_BITS_BYTES * trained if keeps_low_bits(config, model) else 0
    if place == "nvme":
        in_memory = _nvme_buffers(offload) * model.itemsize
    elif leaves_device and offload.get("pin_memory"):
        in_memory = _pinned(model, num_shards)
    running = {
        "gathered": 0
        if num_shards == 1 and not leaves_device
        else _gathered(config, model, zero, on_gpu=on_gpu, is_offloaded=is_offloaded),
        "copies": _copies(config, model, inputs, at_once=on_gpu and not is_offloaded),
        "activations": _activations(config, model, inputs),
        "logits": _logits(config, model, inputs),
    }
    not_running = {"loading": _loading(config, model, num_shards, on_gpu)}
    states = 0
    if config.method == "adamw":
        states = _adamw_states(zero, model, trained, world_size, on_gpu)
        not_running = {"AdamW's step": _ADAMW_STEP * trained}
    held = {
        "shards": 0 if leaves_device else in_memory,
        "low bits": 0 if leaves_device else low_bits,
        "AdamW's states": states,
        "reserve": GPU_RESERVE if on_gpu else CPU_RESERVE,
    }
    parts = held | max(running, not_running, key=lambda moment: sum(moment.values()))
    return RankMemory(
        parts={name: size for name, size in parts.items() if size},
        host=in_memory + low_bits if leaves_device else 0,
        disk=shards if place == "nvme" else 0,
    )


def keeps_low_bits(config: RunConfig, model: ModelSizes) -> bool:
    """Return whether each trained weight has 16 low bits in addition to its own 16."""
    asked = config.method in ZEROTH_ORDER and config.zo.update_precision == "fp32_master"
    return asked and model.itemsize < _FP32_BYTES


def _pinned(model: ModelSizes, num_shards: int) -> int:
    # torch rounds each block of pinned memory up to a power of two (CachingHostAllocator.h, 2.13).
    sizes = [-(-numel // num_shards) * model.itemsize for numel in model.parameters]
    return sum(1 << (size - 1).bit_length() for size in sizes)


def _nvme_buffers(offload: Mapping[str, Any]) -> int:
    return int(offload.get("buffer_count", _NUM_BUFFERS)) * int(offload.get("buffer_size", _BUFFER))


def _gathered(
    config: RunConfig, model: ModelSizes, zero: Mapping[str, Any], *, on_gpu: bool, is_offloaded: bool
) -> int:
    if config.method != "adamw" and not is_offloaded:
        largest, tied = model.parts
        num_parts = 3 if on_gpu else 2
        return max(tied + num_parts * largest, 2 * tied) * model.itemsize
    limits = gathering_limits(model.parts)
    default = _MAX_LIVE if config.method == "adamw" else limits["stage3_max_live_parameters"]
    max_live = int(zero.get("stage3_max_live_parameters", default))
    # In flight is gloo's buffer on CPUs, and on a GPU the module that still runs when the host asks for the
    # next ones.
    return (min(max_live, model.num_parameters) + model.largest_module) * model.itemsize


def _copies(config: RunConfig, model: ModelSizes, inputs: InputSizes, *, at_once: bool) -> int:
    if config.method not in ZEROTH_ORDER:
        return 0
    head = model.head if inputs.num_labels is None else 0
    num_copies = min(copies_per_pass(config), COPIES_AT_ONCE)
    block = (
        model.blocks_trained // model.num_blocks if at_once and num_copies == copies_per_pass(config) else 0
    )
    return num_copies * max(model.largest_perturbed, block, head) * model.itemsize


def _activations(config: RunConfig, model: ModelSizes, inputs: InputSizes) -> int:
    train_rows = copies_per_pass(config) * config.train.micro_batch_size if config.method in TRAINED else 0
    if inputs.trains_on_answers:
        train_rows *= config.generation.num_samples
    eval_rows = config.train.eval_batch_size
    size = max(train_rows, eval_rows) * inputs.length * model.activation_width
    if inputs.new_tokens:
        rows = max(train_rows, eval_rows) if inputs.trains_on_answers else eval_rows
        size += rows * (inputs.length + inputs.new_tokens) * model.num_blocks * model.cached_width
    if config.method == "adamw":
        size += train_rows * inputs.length * model.num_blocks * model.activation_width
    return size * model.itemsize


def _logits(config: RunConfig, model: ModelSizes, inputs: InputSizes) -> int:
    train, copies = config.train, copies_per_pass(config)
    loss = 2 * _FP32_BYTES  # the loss makes two float32 tensors of the logits, one copy at a time
    rows = train.micro_batch_size * (config.generation.num_samples if inputs.trains_on_answers else 1)
    training = rows * (copies * model.itemsize + loss)
    training *= inputs.num_labels or model.vocabulary_size
    scoring = train.eval_batch_size * (model.itemsize + loss) * model.vocabulary_size
    return inputs.answer_tokens * max(training if config.method in TRAINED else 0, scoring)


def _adamw_states(
    zero: Mapping[str, Any], model: ModelSizes, trained: int, world_size: int, on_gpu: bool
) -> int:
    bucket = int(zero.get("reduce_bucket_size", _REDUCE_BUCKET))
    if not on_gpu:  # untouched pages of a bucket take no memory
        bucket = min(bucket, model.num_trained)
    num_buckets = 2 if world_size > 1 else 1  # gradients are reordered before they are summed
    return trained * (model.itemsize + _ADAMW_STATES) + num_buckets * bucket * model.itemsize


def _loading(config: RunConfig, model: ModelSizes, num_shards: int, on_gpu: bool) -> int:
    # A prefix starts from the keys and values of a forward pass, which gathers each module.
    prefix = model.largest_module * model.itemsize if config.peft.kind == "prefix" else 0
    if on_gpu:  # values are read into the host's memory, one shard at a time
        return prefix
    if not keeps_low_bits(config, model):
        return max(prefix, max(model.parameters) * model.itemsize // num_shards)
    # The low bits of later parameters are not there yet.
    reading, later = [], 0
    for numel in reversed(model.parameters):
        later += numel
        reading.append(numel * _SPLIT_BYTES - later * LOW_BITS_BYTES)
    return max(prefix, max(reading) // num_shards)
