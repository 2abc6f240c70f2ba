"""Finds the transformer blocks of a model by its structure, and the sizes of what is gathered at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lezo_ds.errors import UserError


@dataclass(frozen=True)
class BlockLayout:
    """The ModuleList of a model that holds its transformer blocks."""

    path: str  # dotted name, for example "model.decoder.layers"
    num_blocks: int

    def block_of(self, parameter_name: str, *, is_embedding: bool = False) -> int:
        """Return the index of a parameter's block; num_blocks for embeddings, num_blocks + 1 for the rest.

        >>> BlockLayout("model.layers", 2).block_of("model.layers.1.mlp.up_proj.weight")
        1
        >>> BlockLayout("model.layers", 2).block_of("model.norm.weight")
        3
        """
        prefix = self.path + "."
        if not parameter_name.startswith(prefix):
            return self.num_blocks + (not is_embedding)
        return int(parameter_name[len(prefix) :].split(".", 1)[0])


def find_blocks(model: nn.Module) -> BlockLayout:
    """Find the transformer blocks of a decoder: the outermost ModuleList of one class with most parameters.

    A list inside a block (for example, of experts) is not outermost.
    """
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    sizes = {
        # A parameter that ZeRO-3 has sharded is empty. Its full size is ds_numel.
        name: sum(int(getattr(p, "ds_numel", p.numel())) for p in module.parameters())
        for name, module in lists.items()
        if not any(name.startswith(other + ".") for other in lists)
        and len({type(block) for block in module}) == 1
    }
    path = max(sizes, key=lambda name: sizes[name], default=None)
    if path is None or sizes[path] == 0:
        what = f"no transformer blocks in {type(model).__name__}: no list of like modules has parameters"
        raise UserError(
            what, fix="use a decoder language model, such as OPT, Llama, Qwen, Mistral or GPT-2"
        )
    return BlockLayout(path, len(lists[path]))


def freeze_outside(model: nn.Module, layout: BlockLayout) -> None:
    """Set all parameters outside the transformer blocks to not trained."""
    inside = set(model.get_submodule(layout.path).parameters())
    for parameter in model.parameters():
        if parameter not in inside:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in inside):
        what = (
            f"zo.only_blocks leaves nothing to train: the adapter has no weights in {layout.path}"
        )
        raise UserError(what, fix="set zo.only_blocks=false")


class PartSizes(NamedTuple):
    """Numbers of elements of what is gathered at a time: a block, or the parameters of a module outside."""

    largest: int  # of the largest part, tied parameters left out
    tied: int  # of the parameters that several parts use; they stay gathered in a pass


def part_sizes(model: nn.Module, layout: BlockLayout) -> PartSizes:
    """Return the sizes of what is gathered at a time from a model that is not sharded yet."""
    blocks = model.get_submodule(layout.path)
    inside = set(blocks.modules())
    parts = [set(block.parameters()) for block in blocks.children()]
    parts += [
        set(module.parameters(recurse=False)) for module in model.modules() if module not in inside
    ]
    num_users = Counter(parameter for part in parts for parameter in part)
    tied = {parameter for parameter, number in num_users.items() if number > 1}
    sizes = [sum(parameter.numel() for parameter in part - tied) for part in parts]
    return PartSizes(largest=max(sizes), tied=sum(parameter.numel() for parameter in tied))


def gathering_limits(parts: PartSizes) -> dict[str, int]:
    """Return default limits on gathered elements: while a block runs, the next one is gathered."""
    return {
        "stage3_prefetch_bucket_size": parts.largest,
        "stage3_max_live_parameters": parts.tied + 2 * parts.largest,
    }
