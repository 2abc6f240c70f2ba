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
from lezo_ds.sharding.shards import Shard
from lezo_ds.sharding.weights import ShardedWeights
from lezo_ds.zo.keys import prefix_key

_ATTENTION = "lezo_ds_prefix"
_CONFIG = "prefix_config.json"
_FIX = "set peft.kind=lora for this model"


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
        self._attentions: list[Any] = []  # the module of each block

    def attach(self, model: Any, layout: BlockLayout) -> None:
        """Freeze a model that is not sharded yet, and add a prefix to each block's attention.

        A prefix has the parameters "key" and "value", each [heads, vectors, width].
        """
        switchable = getattr(model, "_can_set_attn_implementation", lambda: False)
        attention = getattr(model.config, "_attn_implementation", None)
        if not switchable() or attention != "sdpa":
            raise UserError(
                f"prefix tuning needs sdpa attention, which {type(model).__name__} does not use "
                f"({attention})",
                fix=_FIX,
            )
        model.requires_grad_(False)
        decoder = model.config.get_text_config()
        limit = getattr(decoder, "max_position_embeddings", None)
        if limit is not None and self._length > limit:
            raise UserError(
                f"peft.prefix_length={self._length} is above the {limit} positions of the model",
                fix="set peft.prefix_length=5",
            )
        num_heads, width = key_value_shape(decoder)
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
            vectors = like.new_zeros(num_heads, self._length, width)
            attentions[0].prefix = nn.ParameterDict({"key": vectors, "value": vectors.clone()})
            self._attentions += attentions

    def fill(self, weights: ShardedWeights, model: Any, seed: int) -> None:
        """Take the keys and values of random tokens, then switch the attention. A collective."""
        ids = initial_ids(seed, self._length, model.config.get_text_config().vocab_size)
        body = model.base_model
        with torch.no_grad():
            tokens = torch.tensor([ids], device=distributed.device())
            cache = body(input_ids=tokens, use_cache=True)[cache_name(body)]
        shards = {shard.parameter: shard for shard in weights.adapter_shards}
        for attention in self._attentions:
            states = cache.layers[attention.layer_idx]
            self._fill_from(weights, shards[attention.prefix.key], states.keys)
            self._fill_from(weights, shards[attention.prefix.value], states.values)
        _switch_on(model)

    def _fill_from(self, weights: ShardedWeights, shard: Shard, states: Tensor) -> None:
        """Fill this rank's shard of a prefix with keys or values [1, heads, vectors, width]."""
        if states.shape[1:] != shard.shape:
            raise UserError(
                f"keys and values of {shard.name} have the shape {tuple(states.shape[1:])} "
                f"(heads, vectors, width), not {shard.shape}",
                fix=f"{_FIX}, or reduce peft.prefix_length",
            )
        indices = shard.elements.region.indices(0, shard.count, states.device)
        weights.fill(shard, states.reshape(-1)[indices])

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
    prefix = module.prefix
    return sdpa_attention_forward(
        module,
        query,
        _after(prefix.key, key),
        _after(prefix.value, value),
        F.pad(attention_mask, (prefix.key.shape[1], 0), value=True),
        **kwargs,
    )


def _after(vectors: Tensor, states: Tensor) -> Tensor:
    """Return states [B, H, tokens, D] after the vectors [H, P, D], in each row."""
    return torch.cat([vectors.expand(len(states), -1, -1, -1), states], dim=2)


def _mask(*args: Any, **kwargs: Any) -> Tensor:
    """Return the mask of sdpa (True: attend). sdpa may do without one, but a prefix needs it."""
    mask: Tensor = sdpa_mask(*args, **(kwargs | {"allow_is_causal_skip": False}))
    return mask
