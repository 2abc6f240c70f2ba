"""Finds the transformer blocks of a model by its structure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lezo_ds.errors import UserError


@dataclass(frozen=True)
class BlockLayout:
    """Where a model keeps its transformer blocks.

    Attributes:
        path: dotted name of the ModuleList that holds them (for example, "model.decoder.layers").
        num_blocks: number of blocks.
    """

    path: str
    num_blocks: int

    def block_of(self, parameter_name: str) -> int | None:
        """Return the index of the block that a parameter belongs to, or None if it is outside all blocks.

        >>> BlockLayout("model.layers", 2).block_of("model.layers.1.mlp.up_proj.weight")
        1
        """
        prefix = self.path + "."
        if not parameter_name.startswith(prefix):
            return None
        return int(parameter_name[len(prefix) :].split(".", 1)[0])


def find_blocks(model: nn.Module) -> BlockLayout:
    """Find the transformer blocks of a decoder.

    They are the outermost list of modules of one class that has the most parameters. This holds for OPT,
    Llama, Qwen, Mistral, GPT-NeoX and GPT-2, with and without adapters, so that no list of model names is
    needed. A list inside a block (for example, of experts) is inside another list and is not considered.

    Raises:
        UserError: the model has no such list. The error names the lists that it has.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = {
        name: module
        for name, module in lists.items()
        if not any(name.startswith(other + ".") for other in lists)
    }
    sizes = {
        name: _num_parameters(module)
        for name, module in outermost.items()
        if len(module) > 0 and len({type(block) for block in module}) == 1
    }
    path = max(sizes, key=lambda name: sizes[name], default=None)
    if path is None or sizes[path] == 0:
        found = ", ".join(f"{name} ({len(module)})" for name, module in lists.items()) or "no module lists"
        raise UserError(
            f"no transformer blocks found in {type(model).__name__}",
            got=found,
            expected="a list of modules of one class that have parameters, as in decoder models",
            fix="use a decoder language model, such as OPT, Llama, Qwen, Mistral, GPT-NeoX or GPT-2",
        )
    return BlockLayout(path, len(outermost[path]))


def freeze_outside(model: nn.Module, layout: BlockLayout) -> None:
    """Set all parameters outside the transformer blocks to not trained.

    Raises:
        UserError: all trained parameters are outside the blocks, as those of an adapter may be.
    """
    blocks = model.get_submodule(layout.path)
    inside = set(blocks.parameters())
    for parameter in model.parameters():
        if parameter not in inside:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in inside):
        raise UserError(
            "zo.only_blocks leaves nothing to train",
            got="an adapter outside the blocks",
            expected=f"trained weights in {layout.path}",
            fix="set zo.only_blocks=false",
        )


def largest_module(model: nn.Module, layout: BlockLayout) -> int:
    """Return the number of elements of the largest block, or of a larger module outside the blocks."""
    blocks = model.get_submodule(layout.path)
    inside = set(blocks.modules())
    outside = [module for module in model.modules() if module not in inside]
    own = [sum(p.numel() for p in module.parameters(recurse=False)) for module in outside]
    return max(*own, *map(_num_parameters, blocks.children()))


class PartSizes(NamedTuple):
    """What is gathered at a time: a block, or the parameters of a module outside the blocks.

    Attributes:
        largest: number of elements of the largest part, tied parameters left out.
        tied: number of elements of the parameters that several parts use. They stay gathered in a pass.
    """

    largest: int
    tied: int


def part_sizes(model: nn.Module, layout: BlockLayout) -> PartSizes:
    """Return the sizes of what is gathered at a time from a model that is not sharded yet."""
    blocks = model.get_submodule(layout.path)
    inside = set(blocks.modules())
    parts = [set(block.parameters()) for block in blocks.children()]
    parts += [set(module.parameters(recurse=False)) for module in model.modules() if module not in inside]
    num_users = Counter(parameter for part in parts for parameter in part)
    tied = {parameter for parameter, number in num_users.items() if number > 1}
    sizes = [sum(parameter.numel() for parameter in part - tied) for part in parts]
    return PartSizes(largest=max(sizes), tied=sum(parameter.numel() for parameter in tied))


def gathering_limits(parts: PartSizes) -> dict[str, int]:
    """Return default limits on the number of elements that are gathered.

    While a block runs, the weights of the next one are gathered.
    """
    return {
        "stage3_prefetch_bucket_size": parts.largest,
        "stage3_max_live_parameters": parts.tied + 2 * parts.largest,
    }


def _num_parameters(module: nn.Module) -> int:
    # A parameter that ZeRO-3 has sharded is empty. Its full size is ds_numel.
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in module.parameters())
