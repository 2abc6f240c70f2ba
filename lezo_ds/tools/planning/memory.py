"""How much memory a run needs on each rank, part by part, from the sizes of its model and its batch.

A forward pass holds the rank's shards and, at each module, what ZeRO-3 has gathered, the perturbed copies of
the module's weights (one for each sign), and activations. The module where the sum is largest decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from lezo_ds.config import Forward, Method
from lezo_ds.model.blocks import gathering_limits
from lezo_ds.noise import UpdatePrecision
from lezo_ds.tools.planning.gathering import gathered_elements
from lezo_ds.tools.planning.model_facts import ModelFacts, ModuleFacts

Offload = Literal["none", "cpu", "nvme"]

LOW_BITS_BYTES = 2
FP32_BYTES = 4
_OPTIMIZER_BYTES = 3 * FP32_BYTES  # AdamW's fp32 weights (DeepSpeed keeps them beside the shards) and moments
_STEP_BYTES = 3 * FP32_BYTES  # in AdamW's step: fp32 gradients, and two temporaries of torch's
_HELD_HIDDEN = (
    5  # hidden states held meanwhile: both embeddings, the block's input, the residual, normed ones
)
_SAVED_HIDDEN = 9  # hidden states that a block keeps for its backward pass (Korthikanti et al. 2022)
_SAVED_WIDEST = 2
_DEFAULT_MAX_LIVE = 10**9  # DeepSpeed's own defaults, as those below; the first two for AdamW only
_DEFAULT_PREFETCH = 5 * 10**7
_DEFAULT_REDUCE = 5 * 10**8
_DEFAULT_NUM_BUFFERS = 5
_DEFAULT_BUFFER = 10**8
_LEAST_ON_DISK = 1 << 20  # bytes; DeepSpeed keeps smaller shards in memory
_SPLIT_BYTES = 18  # an element, where low bits are split off: read in 16 bits, float32, three of integers

CPU_RESERVE = int(0.36 * 2**30)
"""Python with torch, transformers and DeepSpeed, as measured: resident before a model is loaded, and after
it, less what this module accounts for."""

GPU_RESERVE = int(2.0 * 2**30)
"""CUDA's context, NCCL's buffers, and what the allocator cannot use: assumed, not measured."""


@dataclass(frozen=True)
class ForwardInputs:
    """A forward pass of one sign.

    Attributes:
        rows: sequences.
        length: tokens of each, with padding.
        num_targets: hidden states whose logits are computed.
        num_logits: logits of each; None for the whole vocabulary.
        num_written: tokens that are then written to each sequence, with a cache of keys and values.
    """

    rows: int
    length: int
    num_targets: int
    num_logits: int | None = None
    num_written: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that go in."""
        return self.rows * self.length


@dataclass(frozen=True)
class Sharding:
    """How weights are spread.

    Attributes:
        partition_size: ranks that share them.
        offload: where shards lie that are not on the device.
        max_live: stage3_max_live_parameters; None for what the model's size sets.
        prefetch_bucket: stage3_prefetch_bucket_size; likewise.
        reduce_bucket: reduce_bucket_size, of gradients.
        on_cpu: the ranks compute on CPUs.
        disk_buffers: elements of the buffers between memory and an NVMe disk.
    """

    partition_size: int
    offload: Offload = "none"
    max_live: int | None = None
    prefetch_bucket: int | None = None
    reduce_bucket: int = _DEFAULT_REDUCE
    on_cpu: bool = False
    disk_buffers: int = _DEFAULT_NUM_BUFFERS * _DEFAULT_BUFFER
    pinned: bool = False


@dataclass(frozen=True)
class Training:
    """What is done with a model that bears on memory.

    Attributes:
        method: as in a recipe.
        precision: how updates are stored.
        forward: both signs at once or in turn.
        train: a micro-batch's forward pass; None for methods that do not train.
        evaluate: one of an evaluation.
    """

    method: Method
    precision: UpdatePrecision
    forward: Forward
    train: ForwardInputs | None
    evaluate: ForwardInputs | None


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank's device at the worst moment, part by part.

    Attributes:
        weights: its shards.
        low_bits: the low 16 bits of fp32_master.
        optimizer: of AdamW: gradients, fp32 weights and moments.
        buckets: in which DeepSpeed reduces gradients.
        update: what AdamW's step needs beside these, if that is the worst moment.
        loading: what loading needs beside these, if that is the worst moment.
        gathered: weights gathered from all ranks.
        copies: perturbed weights of the module that runs.
        activations: hidden states, and keys and values where tokens are written.
        logits: with what the loss makes of them.
        reserve: that belongs to no tensor.
        host_weights: its shards where they are offloaded to its host, or the buffers before a disk; not part
            of the total.
        host_low_bits: the low bits there; not part of the total.
        disk: its shards on an NVMe disk; not part of the total.
    """

    weights: int
    low_bits: int
    optimizer: int
    buckets: int
    update: int
    loading: int
    gathered: int
    copies: int
    activations: int
    logits: int
    reserve: int
    host_weights: int = 0
    host_low_bits: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Bytes of the device."""
        return sum(self.parts().values())

    @property
    def host(self) -> int:
        """Bytes of the host."""
        return self.host_weights + self.host_low_bits

    def parts(self) -> dict[str, int]:
        """Return the parts of the total by name."""
        elsewhere = ("host_weights", "host_low_bits", "disk")
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name not in elsewhere}


def sharding_of(ds_config: Mapping[str, Any], partition_size: int, *, on_cpu: bool) -> Sharding:
    """Return what a DeepSpeed config (`lezo_ds.ds_config.load_ds_config`) says of the spread of weights."""
    zero = ds_config["zero_optimization"]
    offload = zero.get("offload_param", {})
    num_buffers = int(offload.get("buffer_count", _DEFAULT_NUM_BUFFERS))
    return Sharding(
        partition_size=partition_size,
        offload=offload.get("device", "none"),
        max_live=zero.get("stage3_max_live_parameters"),
        prefetch_bucket=zero.get("stage3_prefetch_bucket_size"),
        reduce_bucket=int(zero.get("reduce_bucket_size", _DEFAULT_REDUCE)),
        on_cpu=on_cpu,
        pinned=bool(offload.get("pin_memory", False)),
        disk_buffers=num_buffers * int(offload.get("buffer_size", _DEFAULT_BUFFER)),
    )


def memory_of(model: ModelFacts, sharding: Sharding, training: Training, reserve: int) -> Memory:
    """Return the memory of a rank.

    Args:
        model: with its adapter.
        sharding: of its weights.
        training: what is done with it.
        reserve: bytes that belong to no tensor: CPU_RESERVE, GPU_RESERVE or your own.
    """
    size = sharding.partition_size
    shards = [-(-parameter.numel // size) * model.itemsize for parameter in model.parameters]
    num_trained = sum(-(-p.numel // size) for p in model.parameters if p.trained)
    disk = sum(shard for shard in shards if shard >= _LEAST_ON_DISK) if sharding.offload == "nvme" else 0
    buffers = sharding.disk_buffers * model.itemsize if sharding.offload == "nvme" else 0
    weights = sum(shards) - disk + buffers
    keeps_low_bits = training.method in ("lezo", "mezo") and training.precision == "fp32_master"
    low_bits = num_trained * LOW_BITS_BYTES if keeps_low_bits and model.itemsize < FP32_BYTES else 0
    is_adamw = training.method == "adamw"
    offloaded = sharding.offload != "none" and not sharding.on_cpu
    moments = _moments(model, sharding, training)
    if is_adamw:
        moments.append(_Moment(update=_STEP_BYTES * num_trained))
    else:
        moments.append(_Moment(loading=_loading_bytes(model, sharding, low_bits)))
    worst = max(moments, key=lambda moment: moment.total)
    return Memory(
        weights=0 if offloaded else weights,
        low_bits=0 if offloaded else low_bits,
        optimizer=num_trained * (model.itemsize + _OPTIMIZER_BYTES) if is_adamw else 0,
        buckets=_bucket_bytes(model, sharding) + worst.buckets if is_adamw else 0,
        update=worst.update,
        loading=worst.loading,
        gathered=worst.gathered,
        copies=worst.copies,
        activations=worst.activations,
        logits=worst.logits,
        reserve=reserve,
        host_weights=_host_bytes(shards, weights, sharding) if offloaded else 0,
        host_low_bits=low_bits if offloaded else 0,
        disk=disk,
    )


def _host_bytes(shards: Sequence[int], weights: int, sharding: Sharding) -> int:
    """Return what offloaded shards take of the host: torch rounds each pinned block up to a power of two."""
    if sharding.offload == "nvme" or not sharding.pinned:
        return weights
    return sum(1 << (shard - 1).bit_length() for shard in shards if shard)


def _loading_bytes(model: ModelFacts, sharding: Sharding, low_bits: int) -> int:
    """Return what loading takes above the shards and all low bits.

    Shards are read one after the other, into the host's memory: beside a GPU they take nothing of it. A
    prefix starts from a forward pass that gathers each module's weights whole, through gloo in a buffer more.
    """
    gathered = 0
    if model.starts_with_a_pass:
        by_gloo = sharding.on_cpu and sharding.partition_size > 1
        gathered = max(module.numel for module in model.modules) * model.itemsize * (2 if by_gloo else 1)
    if not sharding.on_cpu:
        return gathered
    shards = [(-(-p.numel // sharding.partition_size), p.trained) for p in model.parameters]
    reading, split = 0, 0
    for numel, trained in shards:
        splits = bool(low_bits) and trained
        reading = max(reading, split + numel * (_SPLIT_BYTES if splits else model.itemsize))
        split += numel * LOW_BITS_BYTES * splits
    return max(gathered, reading - low_bits)


def _bucket_bytes(model: ModelFacts, sharding: Sharding) -> int:
    # Of a CPU's bucket only what is written to is resident.
    used = min(sharding.reduce_bucket, model.num_trained) if sharding.on_cpu else sharding.reduce_bucket
    return used * model.itemsize


@dataclass(frozen=True)
class _Moment:
    gathered: int = 0
    copies: int = 0
    activations: int = 0
    logits: int = 0
    update: int = 0
    loading: int = 0
    buckets: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


def _moments(model: ModelFacts, sharding: Sharding, training: Training) -> list[_Moment]:
    """Return what is held beside the shards at every module, in training and in evaluation."""
    gathered = _gathered(model, sharding, training.method)
    moments = []
    passes = ((training.train, _num_signs(training)), (training.evaluate, 0))
    for inputs, num_signs in passes:
        for module, elements in zip(model.modules, gathered, strict=True):
            if inputs is None:
                continue
            activations = _activation_bytes(model, module, inputs, max(1, num_signs))
            logits = _logit_bytes(model, inputs, max(1, num_signs)) if module.kind == "head" else 0
            buckets, copies = 0, 0
            if training.method != "adamw":
                copies = _copy_bytes(model, module, inputs, num_signs)
            elif num_signs:
                activations += _saved_bytes(model, inputs)
                # Before they are summed over the ranks, gradients are put in another order: a bucket more.
                buckets = _bucket_bytes(model, sharding) if sharding.partition_size > 1 else 0
            in_all = elements * model.itemsize
            moments.append(_Moment(in_all, copies, activations, logits, buckets=buckets))
    return moments


def _num_signs(training: Training) -> int:
    return 2 if training.method in ("lezo", "mezo") and training.forward == "dual" else 1


def _gathered(model: ModelFacts, sharding: Sharding, method: Method) -> list[int]:
    """Return what is gathered beside the shards.

    Nothing where a rank has all weights on its device: there a block is gathered as a whole
    (`zero3.start_engine`), and what is gathered are its shards themselves. Else every module gathers its own.
    """
    if sharding.partition_size == 1 and (sharding.offload == "none" or sharding.on_cpu):
        return [0] * len(model.modules)
    limits = gathering_limits(model.largest_module)
    max_live, bucket = limits["stage3_max_live_parameters"], limits["stage3_prefetch_bucket_size"]
    if method == "adamw":
        max_live, bucket = _DEFAULT_MAX_LIVE, _DEFAULT_PREFETCH
    if sharding.max_live is not None:
        max_live = sharding.max_live
    if sharding.prefetch_bucket is not None:
        bucket = sharding.prefetch_bucket
    # A GPU is asked for the next block while one runs, whose weights are still there (`zero3.keep_in_step`).
    behind = 0 if sharding.on_cpu or method == "adamw" else model.largest_module
    return [behind + elements for elements in gathered_elements(model.modules, max_live, bucket)]


def _copy_bytes(model: ModelFacts, module: ModuleFacts, inputs: ForwardInputs, num_signs: int) -> int:
    """Return the bytes of a module's perturbed weights; of tables only the rows that are read are made."""
    if module.kind == "embedding" or (module.kind == "head" and inputs.num_logits is not None):
        return 0
    trained = [parameter for parameter in module.parameters if parameter.trained]
    return num_signs * sum(p.numel * (FP32_BYTES if p.is_vector else model.itemsize) for p in trained)


def _activation_bytes(model: ModelFacts, module: ModuleFacts, inputs: ForwardInputs, num_signs: int) -> int:
    tokens = num_signs * inputs.num_tokens
    width = _HELD_HIDDEN * model.hidden_size
    if module.kind == "block":
        # The widest output's two halves, and both of them together. In 16 bits a perturbed bias is added to a
        # half in float32, which takes as much as the other half.
        sixteen_bits = model.widest if model.itemsize < FP32_BYTES else 0
        width += (1 + model.num_widest) * model.widest + sixteen_bits
    cache = 0
    if inputs.num_written:
        cached = num_signs * inputs.rows * (inputs.length + inputs.num_written)
        cache = cached * model.num_blocks * model.cached_width
    return (tokens * width + cache) * model.itemsize


def _saved_bytes(model: ModelFacts, inputs: ForwardInputs) -> int:
    """Return what the forward pass keeps for the backward pass."""
    width = _SAVED_HIDDEN * model.hidden_size + _SAVED_WIDEST * model.widest
    return inputs.num_tokens * model.num_blocks * width * model.itemsize


def _logit_bytes(model: ModelFacts, inputs: ForwardInputs, num_signs: int) -> int:
    """Return the bytes of the logits: two copies of both signs', or one, and two of one sign's in float32."""
    count = inputs.num_targets * (inputs.num_logits or model.vocabulary_size)
    joined = num_signs * count * model.itemsize
    return joined + max(joined, 2 * count * FP32_BYTES)
