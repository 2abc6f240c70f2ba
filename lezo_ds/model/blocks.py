"""Transformer blocks: find them by structure, draw those a step leaves out (LeZO, Algorithm 1)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torch import nn

from lezo_ds.errors import UserError


@dataclass(frozen=True)
class BlockLayout:
    """Where a model keeps its transformer blocks.

    Attributes:
        path: dotted name of the ModuleList that holds them, e.g. "model.decoder.layers".
        num_blocks: how many there are.
    """

    path: str
    num_blocks: int

    def block_of(self, parameter_name: str) -> int | None:
        """Return the index of the block a parameter belongs to, None for one outside all blocks.

        >>> BlockLayout("model.layers", 2).block_of("model.layers.1.mlp.up_proj.weight")
        1
        """
        prefix = self.path + "."
        if not parameter_name.startswith(prefix):
            return None
        return int(parameter_name[len(prefix) :].split(".", 1)[0])


def find_blocks(model: nn.Module) -> BlockLayout:
    """Find the transformer blocks of a decoder: the outermost list of equal modules with the most parameters.

    No list of model names is kept: OPT, Llama, Qwen, Mistral, GPT-NeoX, GPT-2 and adapters around them all
    hold their blocks in one ModuleList whose elements have the same class. Lists inside a block (experts,
    say) are inside another list and are not considered.

    Raises:
        UserError: the model has no such list; the message says which lists it has.
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
            expected="one list of equal modules that hold parameters, as decoder models have",
            fix="use a decoder language model, such as OPT, Llama, Qwen, Mistral, GPT-NeoX or GPT-2",
        )
    return BlockLayout(path, len(outermost[path]))


def largest_module(model: nn.Module, layout: BlockLayout) -> int:
    """Return the number of elements of the largest block, or of a larger module outside of them."""
    blocks = model.get_submodule(layout.path)
    inside = set(blocks.modules())
    outside = [module for module in model.modules() if module not in inside]
    own = [sum(p.numel() for p in module.parameters(recurse=False)) for module in outside]
    return max(*own, *map(_num_parameters, blocks.children()))


def gathering_limits(largest: int) -> dict[str, int]:
    """Return how many elements ZeRO-3 gathers at once, where its config does not say.

    While a module runs, the next one's weights are gathered, but no more than two of the largest at a time.

    Args:
        largest: elements of the largest module.
    """
    return {"stage3_prefetch_bucket_size": largest, "stage3_max_live_parameters": 2 * largest}


def _num_parameters(module: nn.Module) -> int:
    # A parameter that ZeRO-3 has sharded is empty; ds_numel is its full size.
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in module.parameters())


def draw_dropped_layers(run_seed: int, step: int, num_blocks: int, num_dropped: int) -> tuple[int, ...]:
    """Draw the blocks left out at one step, uniformly without replacement (LeZO, Algorithm 1, line 3).

    A pure function of (run_seed, step): blocks are ranked by a keyed hash and the first `num_dropped` are
    taken, so that the draw is the same on every machine and version.

    Returns:
        Sorted block indices, `num_dropped` of range(num_blocks).
    """
    if not 0 <= num_dropped <= num_blocks:
        raise ValueError(f"num_dropped {num_dropped} is not in [0, {num_blocks}]")

    def rank(block: int) -> bytes:
        text = f"lezo_ds dropped layers 1|{run_seed}|{step}|{block}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    return tuple(sorted(sorted(range(num_blocks), key=rank)[:num_dropped]))
