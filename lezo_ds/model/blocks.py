"""Finds the transformer blocks of a model by its structure."""

from __future__ import annotations

from dataclasses import dataclass

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


def gathering_limits(largest: int) -> dict[str, int]:
    """Return default limits on the number of elements that ZeRO-3 gathers.

    While a module runs, the weights of the next one are gathered. The limit is two of the largest modules.

    Args:
        largest: number of elements of the largest module.
    """
    return {"stage3_prefetch_bucket_size": largest, "stage3_max_live_parameters": 2 * largest}


def _num_parameters(module: nn.Module) -> int:
    # A parameter that ZeRO-3 has sharded is empty. Its full size is ds_numel.
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in module.parameters())
