"""The memory of a rank, computed from the shapes of a model and of its inputs.

Measured peaks are within 20 % of the formula (tests/unit/test_memory_plan.py). With b bytes a
weight, R ranks that share the weights by ZeRO-3, and c copies of the batch in a forward pass
(zo.probes_per_pass), a rank has the sum of four terms:

    weights      its part of all weights, with the low bits of trained ones if zo.update_precision
                 is fp32_master and b is 2. If R > 1, also what is gathered: the block that runs,
                 the next one (on a GPU one more, because the host runs ahead), and tied weights
                     (b x parameters + 2 x trained) / R + b x (2 or 3 x largest part + tied)
    copies       the perturbed weights of the block that runs, at most 2 copies at a time. A run
                 that trains on answers writes those of one probe after the other, and keeps the
                 copies of all blocks. Directions of low rank have their vectors instead. With
                 model.bits, also the dequantized matrices of the block that runs
    activations  of the block that runs, with the keys and values of all blocks while answers are
                 written; or those of the output head with its logits, if they are more
                     b x c x tokens x width of a block's activations
    reserve      what the libraries need (on a CPU measured, on a GPU assumed), and what a snapshot
                 on a CPU needs beyond a pass: the largest part, and a file of at most 1 GiB

If N ranks split each weight (tensor parallelism), a rank has its part of all weights, and of the
activations inside a block. Each term is at its own maximum, although not all of them are at the
same moment. On CPUs, loading 16-bit weights may need more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import OPTConfig

from lezo_ds.checkpoints.checkpoint import DTYPES, build_model, build_on_meta, resolve_model
from lezo_ds.checkpoints.snapshots import MAX_FILE_BYTES
from lezo_ds.config import (
    RunConfig,
    config_from_dict,
    make_layer_policy,
    num_directions,
    probes_per_pass,
    trained_part,
)
from lezo_ds.config.deepspeed import (
    check_shares,
    ds_config_of,
    offloads_weights,
    tensor_parallel_of,
    tensor_parallel_size,
)
from lezo_ds.data.task_data import TaskData
from lezo_ds.errors import UserError
from lezo_ds.forward.adapters import make_adapter
from lezo_ds.forward.blocks import (
    find_blocks,
    freeze_all_but,
    key_value_shape,
    modules_of_text,
    quantized_matrices,
)
from lezo_ds.forward.dense import COPIES_AT_ONCE
from lezo_ds.sharding.gather import used_together
from lezo_ds.sharding.quantization import num_trained_codes, quantize_parameters
from lezo_ds.sharding.tensor_parallel import vocabulary_modules

GIB = 1 << 30
CPU_RESERVE = 0.68 * GIB
"""Measured: the peak of a run with a model of 10 MB, so Python with all libraries and the data."""
GPU_RESERVE = 2.0 * GIB
"""Assumed: CUDA's context, NCCL's buffers, and what the allocator cannot use."""
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
USABLE = 0.92
"""GiB that CUDA finds, at least, for each gigabyte that a card is sold with. L4, A10G and L40S keep
a part of theirs for the correction of errors; most others have 0.98."""
_LOW_BITS = 2  # bytes of the low bits of a 16-bit weight
# Activations of the model's width that are in memory while a block runs: the embeddings of tokens
# and of positions, the input of the block, the residual, and the output of the norm.
_HIDDEN_STATES = 5
_UNSPLIT = ("GPT2", "Mixtral", "Qwen3Moe", "Phi3", "Olmo2", "Falcon", "Bloom")
"""Models whose blocks AutoTP does not split (docs/clusters.md)."""


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
    """Sizes of the largest forward passes, in tokens.

    Attributes:
        length: Of the longest input.
        rows: Rows of this length for a training example: about one for each candidate, and fewer
            if examples share rows.
        targets: Rows of logits for an example: one for each token of its answers. 0 if training
            compares a few entries of the vocabulary, which take next to nothing.
        new_tokens: Most that the model writes after a prompt.
        trains_on_answers: Whether the model writes answers in training, too.
    """

    length: int
    rows: float = 1
    targets: float = 0
    new_tokens: int = 0
    trains_on_answers: bool = False


def measured_inputs(config: RunConfig, data: TaskData) -> InputSizes:
    """Return the sizes of a run's longest inputs, from its examples."""
    length = 0
    for split in (data.train, data.dev, data.test):
        length = int(max(length, split.longest_prompt, split.lengths.max(initial=0)))
    by_length = data.train.lengths.argsort(kind="stable")
    longest = by_length[-config.train.micro_batch_size :].tolist()
    batch = data.training_batch(longest)
    rows = batch.inputs["input_ids"].numel() / len(longest) / length
    targets = 0.0
    if batch.selection is not None and batch.selection.vocabulary is None:
        targets = len(batch.selection.rows) / len(longest)
    new_tokens = 0
    if data.reader.generation is not None:
        new_tokens = data.reader.generation.max_new_tokens
    return InputSizes(length, rows, targets, new_tokens, data.objective.reads_answers)


class ModelSizes:
    """A model with the adapter that is trained on it, built on the meta device: no weight is read.

    Attributes:
        class_name: Class of the model.
        num_blocks: Number of transformer blocks.
        num_kept: Number of blocks that a step perturbs.
        num_parameters: Number of all parameters, however they are stored.
        num_trained: Number of all trained parameters.
        num_heads: Heads of the keys and values. The divisors of this number can split a block.
        stored: Bytes of all parameters as they are stored, quantized or not.
        low_bits: Bytes of the low bits of trained parameters.
        snapshot: Bytes of a snapshot on the disk.
        gathered: Bytes of the largest part that ZeRO-3 gathers at a time.
        tied: Bytes of tied parameters, which stay gathered.
        unsplit: Share of the stored bytes that tensor parallelism leaves on each rank.
        perturbed: Bytes of a direction of one block: all trained weights, or vectors of low rank.
        head: Bytes of the output head, if it is trained.
        dequantized: Bytes of the dequantized matrices of a block.
        hidden: Bytes of the activations of one token between blocks.
        inner: Bytes of the activations of one token inside a block.
        cached: Bytes of the keys and values of one token in all blocks.
        logits: Bytes of the logits of one token.
    """

    def __init__(self, config: RunConfig) -> None:
        """Build a run's model: that in its directory, or an OPT of the name of a shape.

        Raises:
            HubError: The hub cannot be reached, and the model is not on this machine.
        """
        dtype = DTYPES[config.model.dtype]
        itemsize = dtype.itemsize
        path = Path(config.model.path)
        model: Any
        if path.name in OPT_SHAPES and not path.exists():
            model = build_on_meta(opt_config(path.name), dtype)
        else:
            model = build_model(resolve_model(config.model.path), dtype)
        layout = find_blocks(model)
        blocks: Any = model.get_submodule(layout.path)
        self.class_name = type(model).__name__
        self.num_blocks = layout.num_blocks
        dropped = make_layer_policy(config.zo, layout.num_blocks).num_dropped
        self.num_kept = layout.num_blocks - dropped
        matrices = [weight for weight in blocks[0].parameters() if weight.dim() > 1]
        self._set_widths(model.config.get_text_config(), matrices, itemsize)
        quantized = quantized_matrices(model, layout)
        adapter = make_adapter(config.peft)
        if adapter is not None:
            adapter.attach(model, layout)
        freeze_all_but(trained_part(config.zo), model, layout)
        trained = {weight for weight in model.parameters() if weight.requires_grad}
        self.num_trained = _num_numbers(trained)
        self.num_parameters = _num_numbers(model.parameters())
        head = {model.get_output_embeddings().weight}
        self.head = _num_numbers(head & trained) * itemsize
        trained &= set(blocks.parameters())
        perturbed = _num_numbers(trained)
        if config.zo.noise_rank:
            perturbed = config.zo.noise_rank * sum(sum(weight.shape) for weight in trained)
        self.perturbed = perturbed * itemsize / layout.num_blocks
        self.dequantized = 0
        if config.model.bits:  # from here on, the sizes of matrices are those of their codes
            self.dequantized = _num_numbers(matrices) * itemsize
            quantize_parameters(model, quantized, config.model.bits, 1)
        num_codes = num_trained_codes(model)
        self.low_bits = 0
        if config.zo.update_precision == "fp32_master" and itemsize == _LOW_BITS:
            self.low_bits = _LOW_BITS * (self.num_trained - num_codes)
        self.snapshot = self.num_parameters * itemsize + num_codes + self.low_bits
        if adapter is not None:
            self.snapshot = self.num_trained * itemsize + self.low_bits
        self.stored = _num_numbers(model.parameters()) * itemsize
        largest, tied = gather_sizes(model, blocks)
        self.gathered = largest * itemsize
        self.tied = tied * itemsize
        self.unsplit = 0.0
        if vocabulary_modules(model) is None:
            self.unsplit = 1 - _num_numbers(blocks.parameters()) * itemsize / self.stored

    def _set_widths(self, decoder: Any, matrices: Sequence[Tensor], itemsize: int) -> None:
        """Set the bytes of a token, from the config of a decoder and the matrices of a block."""
        self.hidden: int = decoder.hidden_size * itemsize
        self.logits: int = decoder.vocab_size * itemsize
        # The longest sides are those of feed-forward layers, which have two or, with a gate, three
        # matrices. All but the last return as many activations. While it runs, there are also the
        # outputs of both copies, joined, and a sum with a float32 bias.
        sides = [max(weight.shape[-2:]) for weight in matrices]
        self.inner = (sides.count(max(sides)) + 1) * max(sides) * itemsize
        self.num_heads = 1
        width = decoder.hidden_size
        with suppress(RuntimeError):  # heads of Gemma 4 differ by layer
            self.num_heads, width = key_value_shape(decoder)
        self.cached = 2 * self.num_blocks * self.num_heads * width * itemsize
        if self.class_name.startswith(_UNSPLIT):
            self.num_heads = 1


def gather_sizes(model: nn.Module, blocks: Iterable[nn.Module]) -> tuple[int, int]:
    """Return how many numbers are gathered at a time from a model that is not sharded yet.

    Args:
        model: on any device.
        blocks: its transformer blocks.

    Returns:
        Those of the largest block or module outside the blocks, without tied parameters; and those
        of the tied parameters, which several of these use. They stay gathered until a pass ends.
    """
    used_by, tied = used_together(modules_of_text(model).values(), list(blocks))
    largest = max(_num_numbers(set(used) - tied) for used in used_by.values())
    return largest, _num_numbers(tied)


def _num_numbers(weights: Iterable[Tensor]) -> int:
    return sum(weight.numel() for weight in weights)


def memory_of(
    config: RunConfig,
    model: ModelSizes,
    inputs: InputSizes,
    num_ranks: int,
    *,
    on_gpu: bool = True,
) -> dict[str, float]:
    """Return the bytes of a rank at the peak on its device, by the names of the terms above.

    Args:
        config: The run.
        model: The sizes of its whole model.
        inputs: The sizes of its largest forward passes.
        num_ranks: Number of ranks, which may not be here.
        on_gpu: Whether each rank has a GPU; otherwise the ranks compute on CPUs.

    Raises:
        UserError: The DeepSpeed JSON does not fit the other keys.
    """
    ds_config = ds_config_of(config, num_ranks)
    num_split = tensor_parallel_size(ds_config)
    num_shards = config.partition_size or num_ranks
    if num_split > 1:
        num_shards = 1
    # The part of the weights that tensor parallelism leaves to a rank.
    part = model.unsplit + (1 - model.unsplit) / num_split
    weights = (model.stored + model.low_bits) * part / num_shards
    # A CPU has no other memory to offload to.
    is_offloaded = on_gpu and offloads_weights(ds_config)
    if is_offloaded:
        weights = 0
    gathered = 0
    if num_shards > 1 or is_offloaded:
        num_ahead = 3 if on_gpu else 2
        # While the tied weights are gathered, there is also the message that brings them.
        gathered = model.tied + max(num_ahead * model.gathered, model.tied)
    copies, activations = _memory_of_pass(config, model, inputs, num_split)
    copies *= part
    reserve = GPU_RESERVE
    if not on_gpu:
        reserve = CPU_RESERVE
        if config.peft.kind == "none":
            snapshot = 2 * max(model.tied, model.gathered) + min(model.stored, MAX_FILE_BYTES)
            reserve += max(0, snapshot - gathered - copies - activations)
    return {
        "weights": weights + gathered,
        "copies": copies,
        "activations": activations,
        "reserve": reserve,
    }


def _memory_of_pass(
    config: RunConfig, model: ModelSizes, inputs: InputSizes, num_split: int
) -> tuple[float, float]:
    """Return the bytes of whole perturbed and dequantized weights, and of activations."""
    num_copies = probes_per_pass(config.zo)
    perturbed = min(num_copies, COPIES_AT_ONCE) * model.perturbed
    if inputs.targets:
        perturbed = max(perturbed, COPIES_AT_ONCE * model.head)
    if config.zo.noise_rank:
        perturbed = num_directions(config) * model.num_kept * model.perturbed
    elif inputs.trains_on_answers:  # which are written at one probe after the other
        perturbed = model.num_kept * model.perturbed + model.head
        num_copies = 1
    num_trained = config.train.micro_batch_size
    num_scored = config.train.eval_batch_size
    num_rows = max(num_scored, num_trained * inputs.rows * num_copies)
    width = _HIDDEN_STATES * model.hidden + model.inner / num_split
    activations = num_rows * inputs.length * width
    if inputs.new_tokens:
        num_written = num_rows if inputs.trains_on_answers else num_scored
        num_tokens = num_written * (inputs.length + inputs.new_tokens)
        activations += num_tokens * model.cached / num_split
    num_targets = max(num_scored, COPIES_AT_ONCE * num_trained) * inputs.targets
    return perturbed + model.dequantized, max(activations, num_targets * model.logits)


def ways(
    config: RunConfig, model: ModelSizes, inputs: InputSizes, num_ranks: int, gpu_bytes: float
) -> Iterator[tuple[str, float]]:
    """Yield the ways to share the weights that fit GPUs: the keys of each, and its bytes a rank.

    The ways are ZeRO-3 among `partition_size` ranks, tensor parallelism, and the weights in the
    memory of the hosts; first the one in which each rank has all weights. A way has the run's own
    micro-batch, or one example if that does not fit or cannot be shared by the ranks.
    """
    sizes = range(1, num_ranks + 1)
    whole = " tensor_parallel=1" if tensor_parallel_of(config) > 1 else ""
    split = [size for size in sizes[1:] if model.num_heads % size == 0]
    found = [f"partition_size={size}{whole}" for size in sizes]
    found[1:1] = [f"tensor_parallel={size} partition_size=null" for size in split]
    found.append(f"{found[-1]} deepspeed=zero3_cpu_offload")
    for way in found:
        for smaller in ("", " train.micro_batch_size=1 train.eval_batch_size=1"):
            keys = f"{way}{smaller}"
            with suppress(UserError):  # the run refuses these keys on so many ranks
                changed = config_from_dict(config.model_dump(), "the plan", keys.split())
                check_shares(changed, ds_config_of(changed, num_ranks), num_ranks)
                needed = sum(memory_of(changed, model, inputs, num_ranks).values())
                if needed <= gpu_bytes:
                    yield keys, needed
                    break
