"""What text runs through in a model: its modules, its transformer blocks, and what is gathered."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from lezo_ds.errors import UserError
from lezo_ds.sharding.quantization import GROUP
from lezo_ds.sharding.tensor_parallel import is_linear
from lezo_ds.zo.laws import TrainedPart

_OTHER_INPUTS = re.compile("vision|visual|image|img|video|audio|speech")
"""In the names of modules that read other inputs than text, and of their sections of a config."""


def modules_of_text(model: Any) -> dict[str, nn.Module]:
    """Return the modules that text can reach, by name: all but those for images, video and sound.

    A published model may have a text model as one part. transformers says which part that is. A few
    models, such as Phi-4-multimodal, keep encoders of images and sound within it.
    """
    modules = dict(model.named_modules())
    config = getattr(model, "config", None)
    sections = getattr(config, "sub_configs", {})
    is_wrapper = "text_config" in sections or any(map(_OTHER_INPUTS.search, sections))
    if not is_wrapper:
        return modules
    parts = (model.get_decoder(), model.get_output_embeddings())
    reached = {module for part in parts if part is not None for module in part.modules()}
    return {
        name: module
        for name, module in modules.items()
        if module in reached and not _OTHER_INPUTS.search(name)
    }


def freeze_other_inputs(model: nn.Module) -> None:
    """Set the parameters that text cannot reach to not trained: no loss would depend on them."""
    reached: set[nn.Parameter] = set()
    for module in modules_of_text(model).values():
        reached.update(module.parameters(recurse=False))
    for parameter in model.parameters():
        if parameter not in reached:
            parameter.requires_grad_(False)


@dataclass(frozen=True)
class BlockLayout:
    """The ModuleList of a model that holds its transformer blocks.

    Attributes:
        path: its dotted name, for example "model.decoder.layers".
        num_blocks: its length.
    """

    path: str
    num_blocks: int

    def block_of(self, parameter_name: str, *, is_embedding: bool = False) -> int:
        """Return the index of the block of a parameter.

        Two groups outside the blocks count as blocks, too: that of the embeddings has the index
        `num_blocks`, and that of all other parameters has `num_blocks + 1`.

        >>> BlockLayout("model.layers", 2).block_of("model.layers.1.mlp.up_proj.weight")
        1
        >>> BlockLayout("model.layers", 2).block_of("model.norm.weight")
        3
        """
        prefix = self.path + "."
        if parameter_name.startswith(prefix):
            index, _, _ = parameter_name[len(prefix) :].partition(".")
            return int(index)
        return self.num_blocks if is_embedding else self.num_blocks + 1


def find_blocks(model: nn.Module) -> BlockLayout:
    """Find the transformer blocks of a decoder.

    They are the modules of the outermost ModuleList of one class that has the most parameters,
    among those that text can reach. A list inside a block (for example, of experts) is not
    outermost.

    Raises:
        UserError: no such list has parameters.
    """
    modules = modules_of_text(model)
    lists = {name: module for name, module in modules.items() if isinstance(module, nn.ModuleList)}
    sizes = {}
    for path, blocks in lists.items():
        is_outermost = not any(path.startswith(other + ".") for other in lists)
        has_one_class = len({type(block) for block in blocks}) == 1
        if is_outermost and has_one_class:
            sizes[path] = sum(parameter.numel() for parameter in blocks.parameters())
    if not any(sizes.values()):
        raise UserError(
            f"no transformer blocks in {type(model).__name__}: no list of like modules has "
            "parameters",
            fix="use a decoder language model, such as OPT, Llama, Qwen, Mistral or GPT-2",
        )
    largest = max(sizes, key=sizes.__getitem__)
    return BlockLayout(largest, num_blocks=len(lists[largest]))


def freeze_all_but(part: TrainedPart, model: nn.Module, layout: BlockLayout) -> None:
    """Set all parameters outside a part of the model, or of its adapter, to not trained.

    Raises:
        UserError: nothing is left to train, or a block has a trained matrix that is no plain
            product.
    """
    if part == "all":
        return
    blocks = model.get_submodule(layout.path)
    trained = {parameter for parameter in blocks.parameters() if parameter.requires_grad}
    if part == "products":
        trained &= _matrices_of_products(blocks, layout.path)
    if not trained:
        key = "only_blocks" if part == "blocks" else "noise_rank"
        raise UserError(
            f"zo.{key} leaves nothing to train: the adapter has no weights in {layout.path}",
            fix="set zo.only_blocks=false zo.noise_rank=0",
        )
    for parameter in model.parameters():
        if parameter not in trained:
            parameter.requires_grad_(False)


def _matrices_of_products(blocks: nn.Module, path: str) -> set[nn.Parameter]:
    """Return the matrices of linear modules; UserError: something else has a trained matrix."""
    matrices = set()
    for name, module in blocks.named_modules():
        # Of a list of experts, each runs on some of the tokens only.
        is_product = is_linear(module) and "experts" not in name.split(".")
        for own_name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter.dim() == 1:
                continue
            if not is_product:
                raise UserError(
                    f"zo.noise_rank perturbs linear layers only, and {path}.{name}.{own_name} "
                    f"belongs to a {type(module).__name__}",
                    fix="set zo.noise_rank=0",
                )
            matrices.add(parameter)
    return matrices


def quantized_matrices(model: nn.Module, layout: BlockLayout) -> frozenset[str]:
    """Return the names of the matrices that `model.bits` quantizes, in a model without an adapter.

    These are the matrices of linear modules in the blocks, if they are whole groups of elements.
    """
    names = set()
    for name, module in model.get_submodule(layout.path).named_modules():
        if is_linear(module) and module.weight.numel() % GROUP == 0:
            names.add(f"{layout.path}.{name}.weight")
    return frozenset(names)


def key_value_shape(decoder: Any) -> tuple[int, int]:
    """Return the number of heads of the keys and values in a block, and the width of a head.

    Args:
        decoder: the configuration of a text model.
    """
    num_heads = getattr(decoder, "num_attention_heads", None) or 1
    width = getattr(decoder, "head_dim", None) or decoder.hidden_size // num_heads
    return getattr(decoder, "num_key_value_heads", None) or num_heads, width
