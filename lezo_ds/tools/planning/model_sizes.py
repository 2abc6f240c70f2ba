"""The sizes of a model that decide its memory and traffic, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lezo_ds.config import TRAINED, ZEROTH_ORDER, RunConfig
from lezo_ds.forward.adapters import make_adapter
from lezo_ds.forward.blocks import PartSizes, find_blocks, freeze_outside, largest_module, part_sizes
from lezo_ds.model.checkpoint import build_checked
from lezo_ds.sharding.checkpoint_files import DTYPES, build_on_meta
from lezo_ds.tools.opt_shapes import SHAPES, opt_config

_HIDDEN_STATES = 5  # held while a block runs: both embeddings, the block's input, the residual, the norm
_WIDE_OUTPUTS = 2  # held besides a block's widest outputs: both copies joined, and a float32 bias added


@dataclass(frozen=True)
class ModelSizes:
    """A model with the adapter that is trained on it, if there is one. Sizes are numbers of elements.

    Attributes:
        class_name: name of the model's class.
        blocks_path: dotted name of the list that holds the transformer blocks.
        num_blocks: number of transformer blocks.
        parameters: size of every parameter; a tied parameter appears once.
        num_trained: size of all trained parameters together.
        trains_outside: whether parameters outside the transformer blocks are trained.
        largest_module: size of the largest block, or of a larger module outside the blocks.
        parts: sizes of what is gathered at a time.
        largest_perturbed: trained size of the largest module that a step perturbs whole. Embedding tables do
            not count, because only the rows that are read are perturbed; nor does the output head.
        blocks_trained: size of all trained parameters in the transformer blocks.
        head: trained size of the output head.
        activation_width: size of the activations of one token while a block runs. A block that keeps them for
            a backward pass needs about as much (Korthikanti et al. 2022).
        cached_width: size of the keys and values of one token in one block.
        vocabulary_size: number of logits of a token.
        max_length: longest input in tokens that the model has positions for; None for no limit.
        itemsize: bytes of a weight.
    """

    class_name: str
    blocks_path: str
    num_blocks: int
    parameters: tuple[int, ...]
    num_trained: int
    trains_outside: bool
    largest_module: int
    parts: PartSizes
    largest_perturbed: int
    blocks_trained: int
    head: int
    activation_width: int
    cached_width: int
    vocabulary_size: int
    max_length: int | None
    itemsize: int

    @property
    def num_parameters(self) -> int:
        """Size of all parameters together."""
        return sum(self.parameters)


def model_sizes(config: RunConfig, directory: Path | None = None) -> ModelSizes:
    """Build a run's model without memory for its weights and return its sizes.

    Args:
        config: configuration of the run, which decides dtype and adapter.
        directory: where the model's config.json is; None for model.path, unless the sizes of that model are
            known.

    Raises:
        UserError: the model cannot be found, is not a causal language model, has no transformer blocks, or
            its files do not hold its weights; or the adapter does not fit it.
    """
    path, dtype = config.model.path, DTYPES[config.model.dtype]
    model: Any
    if directory is None and not Path(path).is_dir() and Path(path).name in SHAPES:
        model = build_on_meta(opt_config(Path(path).name), dtype)
        layout = find_blocks(model)
    else:
        model, layout = build_checked(directory or Path(path), config.model.dtype)
    adapter = make_adapter(config.peft if config.method in TRAINED else None)
    if adapter is not None:
        adapter.attach(model, layout)
    if config.method in ZEROTH_ORDER and config.zo.only_blocks:
        freeze_outside(model, layout)
    head = model.get_output_embeddings()
    blocks = model.get_submodule(layout.path)
    tables = [module for module in model.modules() if type(module).forward is nn.Embedding.forward]
    whole = [module for module in model.modules() if module is not head and module not in tables]
    widths = [_output_width(module) for module in blocks[0].modules()]
    num_wide = _WIDE_OUTPUTS + widths.count(max(widths))  # a gated feed-forward layer has two widest outputs
    text = model.config.get_text_config()
    return ModelSizes(
        class_name=type(model).__name__,
        blocks_path=layout.path,
        num_blocks=layout.num_blocks,
        parameters=tuple(parameter.numel() for parameter in model.parameters()),
        num_trained=_trained(model),
        trains_outside=_trained(model) > _trained(blocks),
        largest_module=largest_module(model, layout),
        parts=part_sizes(model, layout),
        largest_perturbed=max(_trained(module, recurse=False) for module in whole),
        blocks_trained=_trained(blocks),
        head=_trained(head) if head else 0,
        activation_width=_HIDDEN_STATES * text.hidden_size + num_wide * max(widths),
        cached_width=_cached_width(text),
        vocabulary_size=text.vocab_size,
        max_length=getattr(text, "max_position_embeddings", None),
        itemsize=dtype.itemsize,
    )


def _trained(module: nn.Module, recurse: bool = True) -> int:
    return sum(p.numel() for p in module.parameters(recurse) if p.requires_grad)


def _cached_width(config: Any) -> int:  # noqa: ANN401
    num_heads: int = getattr(config, "num_attention_heads", None) or 1
    head_width: int = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_cached: int = getattr(config, "num_key_value_heads", None) or num_heads
    return 2 * num_cached * head_width


def _output_width(module: nn.Module) -> int:
    # The bias tells the width, too: GPT-2 stores its weights transposed, but always with a bias.
    own = list(module.parameters(recurse=False))
    weights = [parameter for parameter in own if parameter.dim() == 2]
    biases = [parameter.numel() for parameter in own if parameter.dim() == 1]
    return (biases or [weights[0].shape[0]])[0] if weights else 0
