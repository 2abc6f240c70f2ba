"""A run whose ranks may not be here: the memory and messages of a rank, and the ways to share.

Measured peaks are within 20 % of the formula (tests/unit/test_memory_plan.py). With b bytes a
weight, R ranks that share the weights by ZeRO-3, and c copies of the batch in a forward pass
(zo.probes_per_pass), a rank has

    weights      its part of all parameters:
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
    copies       the perturbed weights of the block that runs, at most 2 copies at a time:
                     b x min(c, 2) x perturbed weights of a block
                 A run that trains on answers writes those of one probe after the other, and keeps
                 all copies of the probe:
                     b x perturbed weights
                 Directions of low rank copy no weights, and have their vectors instead
    activations  of the block that runs:
                     b x c x tokens x activation width
    answers      while they are written, keys and values of all blocks:
                     b x c x (tokens + new tokens) x blocks x cached width
    logits       of the tokens of answers, and what their log-probabilities take, 128 tokens at a
                 time:
                     (b + 8) x 128 x vocabulary
                 A function of logits reads those of all copies, and makes two float32 tensors:
                     (b c + 8) x tokens of answers x vocabulary
                 With them, there are copies of the head. The blocks have run before, so only what
                 exceeds their activations counts
    snapshot     on rank 0, which writes one file after the other: a file of 1 GiB (on a GPU, in
                 the host's memory), and the largest parameter with rank 0's part of it. A forward
                 pass and a snapshot do not happen at the same time, so only what exceeds the terms
                 of a pass counts

If N ranks split each weight (tensor parallelism), a rank has its part of all weights, and of the
activations inside a block. Each term is at its own maximum, although not all of them are at the
same moment. On CPUs, loading 16-bit weights may need more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lezo_ds.checkpoints.snapshots import MAX_FILE_BYTES
from lezo_ds.config import (
    TRAINED,
    ZEROTH_ORDER,
    RunConfig,
    config_to_dict,
    copies_per_pass,
    flatten,
    num_directions,
    num_passes,
)
from lezo_ds.config.deepspeed import (
    ds_config_of,
    needs_zero3,
    offloads_weights,
    tensor_parallel_size,
)
from lezo_ds.forward.dense import COPIES_AT_ONCE
from lezo_ds.forward.wrappers import TARGETS_AT_ONCE
from lezo_ds.tools.sizes import InputSizes, ModelSizes

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
# Activations of the model's width that are in memory while a block runs: the embeddings of tokens
# and of positions, the input of the block, the residual, and the output of the norm.
_HIDDEN_STATES = 5

# Bytes a second between two GPUs (PCIe), and of the memory of a GPU. They only order what fits.
_LINK = 25e9
_GPU_MEMORY = 1e12

# Models whose blocks AutoTP does not split (docs/clusters.md).
_UNSPLIT = ("GPT2", "Mixtral", "Qwen3Moe", "Phi3", "Olmo2", "Falcon", "Bloom")


def memory_of_card(size: float) -> int:
    """Return the bytes of a GPU: of a card that is sold with so many gigabytes, or else of GiB.

    Cards of one size differ by some percent. The smallest of them counts, such as L4 and A10G,
    which keep a part of their 24 GB for the correction of errors.
    """
    return int(_CARDS.get(size, size) * GIB)


@dataclass(frozen=True)
class Plan:
    """A run whose ranks may not be here. UserError: its DeepSpeed JSON does not fit its keys.

    Attributes:
        config: The run.
        model: The sizes of its whole model.
        inputs: The sizes of its largest forward passes.
        num_ranks: Number of ranks.
        on_gpu: Whether each rank has a GPU; otherwise the ranks compute on CPUs.
    """

    config: RunConfig
    model: ModelSizes
    inputs: InputSizes
    num_ranks: int
    on_gpu: bool = True

    def keys_from(self, config: RunConfig) -> dict[str, object]:
        """Return the keys that turn a run into this one, and those that say how it shares."""
        shown = ["train.micro_batch_size", "partition_size"]
        if self.split > 1:
            shown[1] = "tensor_parallel"
        before = flatten(config_to_dict(config))
        after = flatten(config_to_dict(self.config))
        return {key: after[key] for key in after if key in shown or after[key] != before[key]}

    def changed(self, **keys: Any) -> Plan:
        """Return the plan of the run with other values of some keys."""
        return replace(self, config=replace(self.config, **keys))

    # The memory of the rank that needs most, rank 0.

    @cached_property
    def memory(self) -> dict[str, float]:
        """The bytes at the peak on the rank's device, by the names of the terms above."""
        model = self.model
        part_of_rank = self._part_of_split / self._num_shards
        in_pass = self._pass()
        snapshot = 0.0
        if self.config.method in TRAINED and self.config.peft.kind == "none":
            snapshot = max(model.stored) * model.itemsize * (1 + part_of_rank)
            if not self.on_gpu:
                snapshot += min(sum(model.stored) * model.itemsize, MAX_FILE_BYTES)
        on_device = 0 if self._is_offloaded else part_of_rank
        return {
            "weights": sum(model.stored) * model.itemsize * on_device,
            "low bits": model.num_trained * self._low_bits * on_device,
            "reserve": GPU_RESERVE if self.on_gpu else CPU_RESERVE,
            **in_pass,
            "snapshot": max(0, snapshot - sum(in_pass.values())),
        }

    @property
    def peak(self) -> float:
        """The bytes at the peak on the rank's device."""
        return sum(self.memory.values())

    @property
    def in_host(self) -> float:
        """The bytes of weights that a rank offloads to the host's memory."""
        if not self._is_offloaded:
            return 0.0
        num_bytes = self.model.num_trained * self._low_bits / self._num_shards
        # torch rounds each block of pinned memory up to a power of two (CachingHostAllocator.h,
        # 2.13). DeepSpeed pins one block for each parameter.
        for numel in self.model.stored:
            shard_bytes = math.ceil(numel / self._num_shards) * self.model.itemsize
            num_bytes += 1 << (shard_bytes - 1).bit_length()
        return num_bytes

    def fits(self, gpu_bytes: float) -> bool:
        """Return whether a GPU of so many bytes can hold what a rank needs."""
        return self.peak <= gpu_bytes

    @property
    def snapshot(self) -> int:
        """The bytes of a snapshot on the disk."""
        size = self.model.num_trained
        if self.config.peft.kind == "none":
            size = self.model.num_parameters
        return size * self.model.itemsize + self.model.num_trained * self._low_bits

    @cached_property
    def _ds_config(self) -> dict[str, Any]:
        return ds_config_of(self.config, self.num_ranks)

    @cached_property
    def split(self) -> int:
        """The number of ranks that split each weight by tensor parallelism, or 1."""
        return tensor_parallel_size(self._ds_config)

    @property
    def _is_offloaded(self) -> bool:
        # A CPU has no other memory to offload to.
        return self.on_gpu and offloads_weights(self._ds_config)

    @property
    def _num_shards(self) -> int:
        """The number of ranks that share the weights by ZeRO-3."""
        if self.split > 1:
            return 1
        return self.config.partition_size or self.num_ranks

    @property
    def _part_of_split(self) -> float:
        """The part of a weight that tensor parallelism leaves to a rank, on average."""
        share = self.model.share_split
        return 1 - share + share / self.split

    @property
    def _low_bits(self) -> int:
        """The bytes that a trained weight has in addition to its own."""
        is_master = self.config.zo.update_precision == "fp32_master"
        has_low_bits = is_master and self.config.method in ZEROTH_ORDER
        return _LOW_BITS if has_low_bits and self.model.itemsize < _FP32 else 0

    def _pass(self) -> dict[str, float]:
        """Return the bytes that only a forward pass needs: the largest of training or scoring."""
        model = self.model
        inputs = self.inputs
        num_copies = copies_per_pass(self.config)
        if inputs.trains_on_answers and not self.config.zo.noise_rank:
            num_copies = 1
        scored_rows = self.config.train.eval_batch_size
        rows: float = scored_rows
        head = self._logits(scored_rows * inputs.targets, 1)
        if self.config.method in TRAINED:
            num_examples = self.config.train.micro_batch_size
            if inputs.trains_on_answers:  # that are drawn for prompts
                num_examples *= self.config.generation.num_samples
            rows = max(rows, num_copies * num_examples * inputs.rows)
            head = max(head, self._logits(num_examples * inputs.targets, num_copies))
        inner_width = model.inner_width / self.split
        width = _HIDDEN_STATES * model.hidden_width + inner_width
        cached_width = model.cached_width / self.split
        activations = rows * inputs.length * width * model.itemsize
        cached_rows = 0.0
        if inputs.new_tokens:
            cached_rows = rows if inputs.trains_on_answers else scored_rows
        tokens = inputs.length + inputs.new_tokens
        answers = cached_rows * tokens * model.num_blocks * cached_width * model.itemsize
        weight_bytes = model.itemsize * self._part_of_split
        copies = self._copies() * weight_bytes
        if self.config.method in ZEROTH_ORDER and inputs.targets:
            head += min(num_copies, COPIES_AT_ONCE) * model.head * weight_bytes
        gathered = 0
        if self._num_shards > 1 or self._is_offloaded:
            num_ahead = 3 if self.on_gpu else 2
            # While the tied weights are gathered, there is also the message that brings them.
            gathered = model.parts.tied + max(num_ahead * model.parts.largest, model.parts.tied)
        return {
            "gathered": gathered * model.itemsize,
            "dequantized": model.largest_matrix * weight_bytes if self.config.model.bits else 0,
            "copies": copies,
            "activations": activations,
            "answers": answers,
            "logits": max(0, head - activations),
        }

    def _copies(self) -> float:
        """Return the perturbed weights of blocks, or while answers are written, of all.

        Directions of low rank perturb no copies: these are the numbers of all vectors of a step.
        """
        if self.config.method not in ZEROTH_ORDER:
            return 0
        model = self.model
        has_vectors = self.config.zo.noise_rank > 0
        num_copies = num_directions(self.config) if has_vectors else copies_per_pass(self.config)
        if has_vectors or self.inputs.trains_on_answers:
            kept = 1.0 - model.num_dropped / model.num_blocks
            num_kept = num_copies if has_vectors else 1
            return num_kept * (model.blocks_perturbed * kept + model.head)
        return min(num_copies, COPIES_AT_ONCE) * model.blocks_perturbed / model.num_blocks

    def _logits(self, num_targets: float, num_copies: int) -> float:
        """Return the bytes of a pass's logits, and of the float32 tensors that the loss makes."""
        num_logits = num_targets * num_copies
        num_reduced = num_targets
        if not self.inputs.reads_logits:
            num_logits = min(num_targets * num_copies, TARGETS_AT_ONCE)
            num_reduced = num_logits
        bytes_of_entry = num_logits * self.model.itemsize + num_reduced * 2 * _FP32
        return bytes_of_entry * self.model.vocabulary_size

    # What a rank does in a step.

    @property
    def _passes_of_rank(self) -> float:
        return max(1, num_passes(self.config) * self.split / self.num_ranks)

    def received(self) -> float:
        """Return the bytes that a rank receives in a step.

        Under ZeRO-3, each forward pass gathers the weights that the rank does not store:

            passes of a rank x parameters x b x (R - 1) / R

        If N ranks split each weight, a block sums two activations of each token by an all-reduce,
        and the embedding one more. A ring sends each number twice, except for the rank's own part:

            (2 x blocks + 1) x tokens x width x b x 2 x (N - 1) / N

        Logits are left out because they are much smaller.
        """
        model = self.model
        if self.split == 1:
            gathered = sum(model.stored) * (1 - 1 / self._num_shards)
            return self._passes_of_rank * gathered * model.itemsize
        num_rows = self.config.train.micro_batch_size * self.inputs.rows
        num_tokens = copies_per_pass(self.config) * num_rows * self.inputs.mean_length
        summed = (2 * model.num_blocks + 1) * num_tokens * model.hidden_width
        return self._passes_of_rank * summed * model.itemsize * 2 * (1 - 1 / self.split)

    def step_seconds(self) -> float:
        """Return the seconds of messages, and of weights on their way through a GPU's memory.

        The products of a step are the same number in all plans, and left out.
        """
        kept = 1 - self.model.num_dropped / self.model.num_blocks
        # A weight is read, and its copies are written and read.
        num_accesses = 1 + 2 * copies_per_pass(self.config) * kept
        weight_bytes = sum(self.model.stored) * self.model.itemsize / self.split
        accessed = self._passes_of_rank * num_accesses * weight_bytes
        return self.received() / _LINK + accessed / _GPU_MEMORY

    # The ways to share the weights.

    def ways(self, gpu_bytes: float) -> list[Plan]:
        """Return the run with each way to share the weights, and its largest micro-batch that fits.

        The ways are ZeRO-3 among `partition_size` ranks, and tensor parallelism; a part of all
        ranks then holds the model. Those that fit GPUs of so many bytes come first, and the fastest
        of them first.
        """
        sizes = [size for size in range(1, self.num_ranks + 1) if self.num_ranks % size == 0]
        ways = [self._by_zero3(size) for size in sizes]
        if not (self.model.class_name.startswith(_UNSPLIT) or needs_zero3(self.config)):
            source = None if offloads_weights(self._ds_config) else self.config.deepspeed
            for size in sizes[1:]:
                if self.model.num_heads % size == 0:
                    keys = {"tensor_parallel": size, "partition_size": None, "deepspeed": source}
                    ways.append(self.changed(**keys))
        plans = [way._largest_fitting(gpu_bytes) for way in ways]
        plans = [plan for plan in plans if plan._shares_evenly()]
        return sorted(plans, key=lambda plan: (not plan.fits(gpu_bytes), plan.step_seconds()))

    def offloaded(self, gpu_bytes: float) -> Plan:
        """Return the plan whose weights are in the memory of the hosts, likewise."""
        offloaded = self._by_zero3(self.num_ranks).changed(deepspeed="zero3_cpu_offload")
        return offloaded._largest_fitting(gpu_bytes)

    def _by_zero3(self, size: int) -> Plan:
        return self.changed(partition_size=size, tensor_parallel=1 if self.split > 1 else None)

    def _shares_evenly(self) -> bool:
        """Return whether all ranks have the same share of a step."""
        num_groups = self.num_ranks // self.split
        return self.config.method not in TRAINED or num_passes(self.config) % num_groups == 0

    def _largest_fitting(self, gpu_bytes: float) -> Plan:
        """Return the plan with the largest micro-batch that fits, or of 1 example."""
        train = self.config.train
        plan = self
        for size in range(train.batch_size, 0, -1):
            if train.batch_size % size != 0:
                continue
            # An evaluation then needs no more than training, whose passes have several copies.
            num_scored = min(train.eval_batch_size, size * copies_per_pass(self.config))
            sizes = replace(train, micro_batch_size=size, eval_batch_size=num_scored)
            plan = self.changed(train=sizes)
            if plan._shares_evenly() and plan.fits(gpu_bytes):
                break
        return plan
