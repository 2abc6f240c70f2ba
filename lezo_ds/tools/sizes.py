"""The sizes of a model and of its inputs, from which the memory and the messages of a rank follow.

A model is built on the meta device: torch knows all shapes, and no weight takes memory. The inputs
are the examples of the run as its batches lay them out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from torch import nn
from transformers import OPTConfig

from lezo_ds.checkpoints.checkpoint import DTYPES, build_model, build_on_meta
from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig, make_layer_policy
from lezo_ds.data.batches import PAD_MULTIPLE
from lezo_ds.data.task_data import TaskData
from lezo_ds.forward.adapters import make_adapter
from lezo_ds.forward.blocks import (
    GatherSizes,
    find_blocks,
    freeze_all_but,
    gather_sizes,
    quantized_matrices,
)
from lezo_ds.sharding.quantization import quantize_parameters
from lezo_ds.sharding.tensor_parallel import vocabulary_modules

# Activations of the model's width that are in memory while a block runs: the embeddings of tokens
# and of positions, the input of the block, the residual, and the output of the norm.
HIDDEN_STATES = 5
# Activations of a block's largest width that are in memory besides those the layers return: the
# outputs of both copies, joined, and a sum with a float32 bias.
_WIDE_COPIES = 2

# Numbers of blocks, width and number of heads (Zhang et al. 2022, table 1).
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


@dataclass(frozen=True)
class ModelSizes:
    """A model with the adapter that is trained on it, if there is one.

    Sizes are numbers of elements, unless another unit is named.

    Attributes:
        class_name: Class of the model.
        blocks_path: Name of the module that lists the transformer blocks.
        num_blocks: Number of transformer blocks.
        num_parameters: Size of all parameters, however they are stored.
        stored: Size of each parameter as it is stored, quantized or not. A tied one appears once.
        dequantized: Size of the largest matrix that is dequantized while its module runs, or 0.
        num_trained: Size of all trained parameters.
        num_dropped: Number of blocks that a step drops.
        parts: Sizes of what ZeRO-3 gathers at a time.
        largest_perturbed: Numbers of a direction of the module that has most of them: one for each
            trained weight, or those of the vectors of low rank. Embeddings are left
            out because only the rows that are read are perturbed, and so is the output head.
        blocks_perturbed: Numbers of a direction of all blocks.
        heads: The divisors of this number can split the heads of queries, keys and values.
        splittable: What tensor parallelism splits: linear layers of the blocks, the vocabulary.
        has_split_vocabulary: Whether tensor parallelism splits the embedding and the output head.
        hidden_width: Width of the activations between blocks.
        head: Trained weights of the output head.
        activation_width: Activations of one token while a block runs.
        cached_width: Keys and values of one token in one block.
        vocabulary_size: Logits of one token.
        max_length: Most tokens of an input, or None if the model does not say.
        itemsize: Bytes of a weight.
    """

    class_name: str
    blocks_path: str
    num_blocks: int
    num_parameters: int
    stored: tuple[int, ...]
    dequantized: int
    num_trained: int
    num_dropped: int
    parts: GatherSizes
    largest_perturbed: int
    blocks_perturbed: int
    heads: int
    splittable: int
    has_split_vocabulary: bool
    hidden_width: int
    head: int
    activation_width: int
    cached_width: int
    vocabulary_size: int
    max_length: int | None
    itemsize: int

    @property
    def num_stored(self) -> int:
        return sum(self.stored)


@dataclass(frozen=True)
class InputSizes:
    """Sizes of the largest forward passes.

    Attributes:
        length: Tokens of the longest input, with its padding.
        mean_length: Tokens of a training example on average; 0 if that is not known.
        rows: Rows of this length for a training example: about one for each candidate, and fewer
            if examples share rows.
        targets: Rows of logits for a training example: one for each token of its answers.
        answer_tokens: Rows of logits for a row of an evaluation.
        num_labels: Entries of the vocabulary that training compares; None for all of them.
        reads_logits: Whether a function reads logits, and not log-probabilities of tokens.
        new_tokens: Tokens that the model writes after a prompt in an evaluation.
        trains_on_answers: Whether the model writes answers in training, too.
    """

    length: int
    mean_length: float = 0
    rows: float = 1
    targets: float = 1
    answer_tokens: int = 1
    num_labels: int | None = None
    reads_logits: bool = False
    new_tokens: int = 0
    trains_on_answers: bool = False


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


def model_sizes(config: RunConfig, source: Path | str) -> ModelSizes:
    """Build a run's model without weights, and return its sizes.

    Args:
        config: The run, which names the adapter and what is trained.
        source: The folder of a model, or the name of an OPT shape.
    """
    dtype = DTYPES[config.model.dtype]
    model: Any
    if isinstance(source, str):
        model = build_on_meta(opt_config(source), dtype)
    else:
        model = build_model(source, dtype)
    layout = find_blocks(model)
    blocks = model.get_submodule(layout.path)
    matrices = quantized_matrices(model, layout)
    adapter = make_adapter(config.peft if config.method in TRAINED else None)
    if adapter is not None:
        adapter.attach(model, layout)
    num_dropped = 0
    if config.method in ZEROTH_ORDER:
        freeze_all_but(config.zo.trained_part, model, layout)
        trains_outside = _num_trained(model) > _num_trained(blocks)
        policy = make_layer_policy(config.zo, layout.num_blocks, trains_outside=trains_outside)
        num_dropped = policy.num_dropped

    rank = config.zo.noise_rank
    decoder = model.config.get_text_config()
    num_heads = getattr(decoder, "num_attention_heads", None) or 1
    num_cached_heads = getattr(decoder, "num_key_value_heads", None) or num_heads
    head_width = getattr(decoder, "head_dim", None) or decoder.hidden_size // num_heads
    head = model.get_output_embeddings()
    vocabulary = vocabulary_modules(model) or ()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    largest_perturbed = _largest_perturbed(model, head, rank)
    activation_width = _activation_width(blocks[0], decoder.hidden_size)
    dequantized = 0
    if config.model.bits:  # from here on, the sizes of these matrices are those of their codes
        own_name = adapter.own_name if adapter else str
        quantizations = quantize_parameters(model, matrices, config.model.bits, 1, own_name)
        dequantized = max((matrix.numel for matrix in quantizations), default=0)
    return ModelSizes(
        class_name=type(model).__name__,
        blocks_path=layout.path,
        num_blocks=layout.num_blocks,
        num_parameters=num_parameters,
        stored=tuple(parameter.numel() for parameter in model.parameters()),
        dequantized=dequantized,
        num_trained=_num_trained(model),
        num_dropped=num_dropped,
        parts=gather_sizes(model, layout),
        largest_perturbed=largest_perturbed,
        blocks_perturbed=_num_perturbed(blocks, rank),
        heads=math.gcd(num_heads, num_cached_heads),
        splittable=_num_splittable(blocks, vocabulary),
        has_split_vocabulary=bool(vocabulary),
        hidden_width=decoder.hidden_size,
        head=_num_trained(head) if head else 0,
        activation_width=activation_width,
        cached_width=2 * num_cached_heads * head_width,  # a key and a value
        vocabulary_size=decoder.vocab_size,
        max_length=getattr(decoder, "max_position_embeddings", None),
        itemsize=dtype.itemsize,
    )


def measured_inputs(config: RunConfig, data: TaskData) -> InputSizes:
    """Return the sizes of a run's longest inputs, from its examples."""
    splits = [data.dev, data.test]
    if config.method in TRAINED:
        splits.append(data.train)
    examples = [example for split in splits for example in split.encoded]
    lengths = [example.num_tokens for example in examples]
    for split in splits:
        lengths += [len(ids) for ids in split.prompts]
    length = math.ceil(max(lengths) / PAD_MULTIPLE) * PAD_MULTIPLE
    answer_tokens = 1
    for example in examples:
        longest_option = max(example.option_lengths, default=1)
        # Options of one token share a row.
        num_selected = len(example.option_lengths) if longest_option == 1 else longest_option
        answer_tokens = max(answer_tokens, num_selected)
    training = data.train.encoded or data.test.encoded
    by_length = sorted(range(len(training)), key=lambda row: training[row].num_tokens)
    longest = by_length[-config.train.micro_batch_size :]
    batch = data.training_batch(longest)
    targets = float(answer_tokens)
    num_labels = None
    selection = batch.selection
    # An evaluation of a chat counts the tokens that are the model's first choice.
    reads_logits = selection is None or data.task.kind == "chat"
    if selection is not None:
        targets = len(selection.rows) / len(longest)
        if selection.vocabulary is not None:
            num_labels = len(selection.vocabulary)
        elif selection.targets is None:
            reads_logits = True
    return InputSizes(
        length=length,
        mean_length=mean(example.num_tokens for example in training),
        rows=batch.inputs["input_ids"].numel() / len(longest) / length,
        targets=targets,
        answer_tokens=answer_tokens,
        num_labels=num_labels,
        reads_logits=reads_logits,
        new_tokens=0 if data.generation is None else data.generation.max_new_tokens,
        trains_on_answers=data.objective.reads_answers,
    )


def _num_trained(module: nn.Module, recurse: bool = True) -> int:
    parameters = module.parameters(recurse)
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def _num_perturbed(module: nn.Module, rank: int, recurse: bool = True) -> int:
    """Return the numbers of a direction: one for each trained weight, or those of its vectors."""
    if rank == 0:
        return _num_trained(module, recurse)
    parameters = module.parameters(recurse)
    return sum(rank * sum(parameter.shape) for parameter in parameters if parameter.requires_grad)


def _largest_perturbed(model: nn.Module, head: nn.Module | None, rank: int) -> int:
    """Return the numbers of a direction of the largest module that is perturbed."""
    return max(
        _num_perturbed(module, rank, recurse=False)
        for module in model.modules()
        if module is not head and type(module).forward is not nn.Embedding.forward
    )


def _num_splittable(blocks: nn.Module, vocabulary: tuple[nn.Module, ...]) -> int:
    """Return the size of the matrices that tensor parallelism splits. A tied one counts once."""
    linear_layers = [module for module in blocks.modules() if isinstance(module, nn.Linear)]
    matrices = {module.weight for module in (*linear_layers, *vocabulary)}
    return sum(matrix.numel() for matrix in matrices)  # type: ignore[operator,misc]


def _activation_width(block: nn.Module, hidden_width: int) -> int:
    """Return the elements that are in memory for one token while a block runs."""
    widths = [_output_width(module) for module in block.modules()]
    largest = max(widths)
    num_largest = widths.count(largest)  # 2 in a gated feed-forward layer
    return HIDDEN_STATES * hidden_width + (_WIDE_COPIES + num_largest) * largest


def _output_width(module: nn.Module) -> int:
    """Return the width of what a linear layer or a norm returns for one token, else 0."""
    own = list(module.parameters(recurse=False))
    weights = [parameter for parameter in own if parameter.dim() == 2]
    biases = [parameter for parameter in own if parameter.dim() == 1]
    if not weights:
        return 0
    # GPT-2 stores its weights transposed, but its layers always have a bias.
    return biases[0].numel() if biases else weights[0].shape[0]
