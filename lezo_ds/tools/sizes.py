"""The sizes of a model and of its inputs, from which the memory and the messages of a rank follow.

A model is built on the meta device: torch knows all shapes, and no weight takes memory. The inputs
are the examples of the run as its batches lay them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from torch import nn
from transformers import OPTConfig

from lezo_ds.checkpoints.checkpoint import DTYPES, build_model, build_on_meta
from lezo_ds.config import (
    TRAINED,
    ZEROTH_ORDER,
    RunConfig,
    make_layer_policy,
    trained_part,
)
from lezo_ds.data.batches import PAD_MULTIPLE
from lezo_ds.data.task_data import TaskData
from lezo_ds.forward.adapters import make_adapter
from lezo_ds.forward.blocks import (
    find_blocks,
    freeze_all_but,
    gather_sizes,
    key_value_shape,
    quantized_matrices,
)
from lezo_ds.sharding.quantization import quantize_parameters
from lezo_ds.sharding.tensor_parallel import vocabulary_modules

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


class ModelSizes:
    """A model with the adapter that is trained on it, if there is one.

    Sizes are numbers of elements, unless another unit is named.

    Attributes:
        class_name: Class of the model.
        num_blocks: Number of transformer blocks.
        num_dropped: Number of blocks that a step drops.
        num_parameters: Size of all parameters, however they are stored.
        num_trained: Size of all trained parameters.
        stored: Size of each parameter as it is stored, quantized or not. A tied one appears once.
        largest_matrix: Size of the largest matrix of a block, quantized or not.
        parts: Sizes of what ZeRO-3 gathers at a time.
        blocks_perturbed: Numbers of a direction of all blocks: one for each trained weight, or
            those of the vectors of low rank.
        head: Trained weights of the output head.
        num_heads: Heads of the keys and values. The divisors of this number can split a block.
        share_split: The share of the stored elements that tensor parallelism splits: linear layers
            of the blocks, and the vocabulary.
        hidden_width: Width of the activations between blocks.
        inner_width: Activations of one token inside a block.
        cached_width: Keys and values of one token in one block.
        vocabulary_size: Logits of one token.
        itemsize: Bytes of a weight.
    """

    def __init__(self, config: RunConfig, source: Path | str) -> None:
        """Build a run's model without weights.

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
        blocks: Any = model.get_submodule(layout.path)
        self.class_name = type(model).__name__
        self.num_blocks = layout.num_blocks
        self.itemsize: int = dtype.itemsize
        decoder = model.config.get_text_config()
        self.vocabulary_size = int(decoder.vocab_size)
        self.hidden_width = int(decoder.hidden_size)
        # The longest sides are those of feed-forward layers, which have two or, with a gate, three
        # matrices. All but the last return as many activations. While it runs, there are also the
        # outputs of both copies, joined, and a sum with a float32 bias.
        sides = [max(weight.shape[-2:]) for weight in blocks[0].parameters() if weight.dim() > 1]
        self.inner_width: int = (sides.count(max(sides)) + 1) * max(sides)
        self.num_heads, head_width = key_value_shape(decoder)
        self.cached_width = 2 * self.num_heads * head_width  # a key and a value
        self.largest_matrix: int = max(weight.numel() for weight in blocks[0].parameters())

        matrices = quantized_matrices(model, layout)
        adapter = make_adapter(config.peft if config.method in TRAINED else None)
        if adapter is not None:
            adapter.attach(model, layout)
        self.num_dropped = 0
        if config.method in ZEROTH_ORDER:
            freeze_all_but(trained_part(config.zo), model, layout)
            self.num_dropped = make_layer_policy(config.zo, layout.num_blocks).num_dropped
        rank = config.zo.noise_rank
        head = model.get_output_embeddings()
        self.num_parameters: int = sum(parameter.numel() for parameter in model.parameters())
        self.num_trained = _num_perturbed(model.parameters(), rank=0)
        self.blocks_perturbed = _num_perturbed(blocks.parameters(), rank)
        self.head = _num_perturbed(head.parameters(), rank=0) if head else 0

        if config.model.bits:  # from here on, the sizes of these matrices are those of their codes
            quantize_parameters(model, matrices, config.model.bits, 1)
        self.stored: list[int] = [parameter.numel() for parameter in model.parameters()]
        self.parts = gather_sizes(model, layout)
        linear_layers = [module for module in blocks.modules() if isinstance(module, nn.Linear)]
        split = {module.weight for module in (*linear_layers, *(vocabulary_modules(model) or ()))}
        self.share_split: float = sum(matrix.numel() for matrix in split) / sum(self.stored)


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
        reads_logits: Whether a function reads logits, and not log-probabilities of tokens.
        new_tokens: Tokens that the model writes after a prompt in an evaluation.
        trains_on_answers: Whether the model writes answers in training, too.
    """

    length: int
    mean_length: float
    rows: float = 1
    targets: float = 0
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


def measured_inputs(config: RunConfig, data: TaskData) -> InputSizes:
    """Return the sizes of a run's longest inputs, from its examples."""
    splits = [data.dev, data.test]
    if config.method in TRAINED:
        splits.append(data.train)
    lengths = [len(prompt) for split in splits for prompt in split.prompts]
    lengths += [example.num_tokens for split in splits for example in split.encoded]
    length = math.ceil(max(lengths) / PAD_MULTIPLE) * PAD_MULTIPLE
    training = data.train.encoded or data.test.encoded
    by_length = sorted(range(len(training)), key=lambda row: training[row].num_tokens)
    longest = by_length[-config.train.micro_batch_size :]
    batch = data.training_batch(longest)
    selection = batch.selection
    targets = 1.0
    reads_logits = True
    if selection is not None:
        targets = len(selection.rows) / len(longest) if selection.vocabulary is None else 0.0
        # An evaluation of a chat counts the tokens that are the model's first choice.
        reads_logits = selection.targets is None or data.task.reads_first_choices
    return InputSizes(
        length=length,
        mean_length=mean(example.num_tokens for example in training),
        rows=batch.inputs["input_ids"].numel() / len(longest) / length,
        targets=targets,
        reads_logits=reads_logits,
        new_tokens=0 if data.generation is None else data.generation.max_new_tokens,
        trains_on_answers=data.objective.reads_answers,
    )


def _num_perturbed(parameters: Iterable[nn.Parameter], rank: int) -> int:
    """Return the numbers of a direction: one for each trained weight, or those of its vectors."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if rank:
        return sum(rank * sum(parameter.shape) for parameter in trained)
    return sum(parameter.numel() for parameter in trained)
