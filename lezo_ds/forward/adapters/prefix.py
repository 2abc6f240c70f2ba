"""Prefix tuning (Li and Liang 2021), as in MeZO: key and value vectors before every sequence.

Each attention module has vectors of its own, without reparameterization. They are put before the
keys and values where attention is computed:

    keys and values of a row   prefix [heads, vectors, width] | text [heads, tokens, width]

So every query sees the prefix, even past a sliding window, and the positions, masks and key-value
caches of the text are the same as without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lezo_ds import distributed
from lezo_ds.errors import UserError
from lezo_ds.forward.answer_cache import cache_name
from lezo_ds.forward.blocks import BlockLayout, find_blocks, key_value_shape
from lezo_ds.sharding.gather import GatherAhead
from lezo_ds.sharding.weights import ShardedWeights
from lezo_ds.zo.keys import prefix_key

_ATTENTION = "lezo_ds_prefix"
_CONFIG = "prefix_config.json"
_FIX = "set peft.kind=lora for this model"


class Prefix(nn.Module):
    """The key and value vectors of one attention module, gathered like any module's parameters.

    Args:
        shape: (heads, vectors, width) of each of the two.
        like: a tensor of the model's dtype and device.
    """

    def __init__(self, shape: tuple[int, int, int], like: Tensor) -> None:
        super().__init__()
        self.key = nn.Parameter(like.new_zeros(shape))
        self.value = nn.Parameter(like.new_zeros(shape))

    def forward(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors for each row of `keys` [B, H, tokens, D]: two tensors [B, H, P, D]."""
        rows = keys.shape[0]
        # These are copies, because DeepSpeed releases the vectors as soon as this module has run.
        return self.key.repeat(rows, 1, 1, 1), self.value.repeat(rows, 1, 1, 1)


class PrefixAdapter:
    """It starts from the keys and values of random tokens (Malladi et al. 2023, table 17).

    Args:
        length: number of vectors before each sequence.
    """

    weights_file = "prefix.safetensors"
    config_file = _CONFIG
    stored_prefix = ""

    def __init__(self, length: int) -> None:
        self._length = length

    def attach(self, model: Any, layout: BlockLayout) -> None:
        """Freeze a model that is not sharded yet, and add a `Prefix` to each block's attention."""
        switchable = getattr(model, "_can_set_attn_implementation", lambda: False)
        attention = getattr(model.config, "_attn_implementation", None)
        if not switchable() or attention != "sdpa":
            raise UserError(
                f"prefix tuning needs sdpa attention, which {type(model).__name__} does not use "
                f"({attention})",
                fix=_FIX,
            )
        model.requires_grad_(False)
        num_heads, width = key_value_shape(model.config.get_text_config())
        like = next(model.parameters())
        for block in model.get_submodule(layout.path).children():
            # Attention functions of transformers read these attributes of their module.
            attentions = [
                m for m in block.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")
            ]
            if len(attentions) != 1:
                raise UserError(
                    f"prefix tuning needs one attention module in each block, not "
                    f"{len(attentions)}, as {type(block).__name__} has",
                    fix=_FIX,
                )
            attentions[0].prefix = Prefix((num_heads, self._length, width), like)

    def fill(self, weights: ShardedWeights, model: nn.Module, seed: int) -> None:
        """Take the keys and values of random tokens, then switch the attention. A collective."""
        cache = self._run_random_tokens(weights, model, seed)
        shards = {shard.parameter: shard for shard in weights.adapter_shards}
        for module in model.modules():
            prefix = getattr(module, "prefix", None)
            if not isinstance(prefix, Prefix):
                continue
            states = cache.layers[module.layer_idx]
            self._fill_from(weights, shards[prefix.key], states.keys)
            self._fill_from(weights, shards[prefix.value], states.values)
        _switch_on(model)

    def _run_random_tokens(self, weights: ShardedWeights, model: nn.Module, seed: int) -> Any:
        """Return the key-value cache after one row of random tokens, [1, heads, vectors, width]."""
        config: Any = model.config
        ids = initial_ids(seed, self._length, config.get_text_config().vocab_size)
        body: Any = model.base_model
        blocks = list(model.get_submodule(find_blocks(model).path).children())
        gather = GatherAhead(body, blocks)
        with torch.no_grad():
            tokens = torch.tensor([ids], device=distributed.device())
            cache = body(input_ids=tokens, use_cache=True)[cache_name(body)]
        gather.remove()
        return cache

    def _fill_from(self, weights: ShardedWeights, shard: Any, states: Tensor) -> None:
        """Fill this rank's shard of a prefix with keys or values [1, heads, vectors, width]."""
        if states.shape[1:] != shard.shape:
            raise UserError(
                f"keys and values of {shard.name} have the shape {tuple(states.shape[1:])} "
                f"(heads, vectors, width), not {shard.shape}",
                fix=f"{_FIX}, or reduce peft.prefix_length",
            )
        weights.fill(shard, shard.own_elements(states))

    def write_config(self, directory: Path, base_model: str) -> None:
        """Write what `load_prefix` needs besides the vectors."""
        config = {
            "format": 1,
            "prefix_length": self._length,
            "base_model_name_or_path": base_model,
        }
        (directory / _CONFIG).write_text(json.dumps(config, indent=1) + "\n")

    @staticmethod
    def keys(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Return the section `peft` of a run that wrote a config, and tensors of these shapes."""
        return {"kind": "prefix", "prefix_length": shapes[min(shapes)][1]}


def load_prefix(model: nn.Module, directory: Path) -> None:
    """Freeze a base model of transformers, and add the prefix of a snapshot or an export to it.

    Raises:
        UserError: the prefix is of another model.
    """
    length = json.loads((directory / _CONFIG).read_text())["prefix_length"]
    tensors = load_file(directory / PrefixAdapter.weights_file)
    PrefixAdapter(length).attach(model, find_blocks(model))
    own_shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    if own_shapes != {name: tensor.shape for name, tensor in tensors.items()}:
        raise UserError(
            f"the prefix in {directory} does not fit {type(model).__name__}",
            fix=f"use the base model that {_CONFIG} names",
        )
    model.load_state_dict(tensors, strict=False)  # the base model has its weights already
    _switch_on(model)


def initial_ids(run_seed: int, length: int, vocabulary_size: int) -> list[int]:
    """Return the random tokens whose keys and values a prefix starts from."""
    return [prefix_key(run_seed, position) % vocabulary_size for position in range(length)]


def _switch_on(model: Any) -> None:
    # transformers looks attention up by name in tables of the process. Other models are not
    # affected, because only this model uses the new name.
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, _mask)
    model.set_attn_implementation(_ATTENTION)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **kwargs: Any,
) -> Any:
    """Attend to the prefix and to what the mask allows. An attention function of transformers."""
    prefix_key, prefix_value = module.prefix(key)
    return sdpa_attention_forward(
        module,
        query,
        torch.cat([prefix_key, key], dim=2),
        torch.cat([prefix_value, value], dim=2),
        F.pad(attention_mask, (prefix_key.shape[2], 0), value=True),
        **kwargs,
    )


def _mask(*args: Any, **kwargs: Any) -> Tensor:
    """Return the mask of sdpa (True: attend). sdpa may do without one, but a prefix needs it."""
    mask: Tensor = sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))
    return mask
