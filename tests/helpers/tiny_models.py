"""One tiny, randomly initialised model of each family the tests cover, built from its config."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lezo_ds.forward.blocks import find_blocks
from lezo_ds.forward.probes import TrainedParameter
from lezo_ds.noise import Elements
from lezo_ds.sharding.parameters import parameter_ids

VOCABULARY = 48
NUM_BLOCKS = 3

_SPECIAL = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "vocab_size": VOCABULARY}
_COMMON = {
    **_SPECIAL,
    "hidden_size": 16,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_WITH_MLP = {**_COMMON, "intermediate_size": 24}
_LLAMA_LIKE = {**_WITH_MLP, "num_key_value_heads": 2, "head_dim": 4}
_OPT = {**_COMMON, "ffn_dim": 24}

FAMILIES = {
    "opt": (OPTConfig(**_OPT, word_embed_proj_dim=16), "model.decoder.layers"),
    "opt_projected": (
        OPTConfig(**_OPT, word_embed_proj_dim=8, do_layer_norm_before=False),
        "model.decoder.layers",
    ),
    "llama": (LlamaConfig(**_LLAMA_LIKE), "model.layers"),
    "mistral": (MistralConfig(**_LLAMA_LIKE, sliding_window=8), "model.layers"),
    "qwen2": (Qwen2Config(**_LLAMA_LIKE, tie_word_embeddings=True), "model.layers"),
    "qwen3": (Qwen3Config(**_LLAMA_LIKE), "model.layers"),
    "gpt_neox": (GPTNeoXConfig(**_WITH_MLP), "gpt_neox.layers"),
    "gpt2": (
        GPT2Config(**_SPECIAL, n_embd=16, n_inner=24, n_layer=NUM_BLOCKS, n_head=4, n_positions=64),
        "transformer.h",
    ),
    # The one here whose output head has a bias.
    "phi": (PhiConfig(**_WITH_MLP), "model.layers"),
    # Mixtures of experts: each has three experts in a block, and two run for a token.
    "mixtral": (
        MixtralConfig(**_LLAMA_LIKE, num_local_experts=3, num_experts_per_tok=2),
        "model.layers",
    ),
    "qwen3_moe": (
        Qwen3MoeConfig(
            **_LLAMA_LIKE,
            num_experts=3,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            norm_topk_prob=True,
        ),
        "model.layers",
    ),
    "gemma": (GemmaConfig(**_LLAMA_LIKE), "model.layers"),
    "gemma2": (Gemma2Config(**_LLAMA_LIKE, sliding_window=8), "model.layers"),
}
"""Family -> (config, path of its blocks)."""

MIXTURES = ("mixtral", "qwen3_moe")
"""Families whose tokens choose experts: a rounding may change the choice, and the logits with
it."""


def random_model(config, dtype=torch.float32, seed=0):
    """Return a model whose every parameter is random and matters to the logits."""
    return random_values(AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), seed)


def random_values(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((1 if parameter.dim() == 1 else 0) + 0.2 * noise)
    return model


def tiny_model(family, dtype=torch.float32, seed=0):
    model = random_model(FAMILIES[family][0], dtype, seed)
    model.config.use_cache = False
    return model


@torch.no_grad()
def greedy(model, prompt, num_tokens, stop_ids=()):
    """Return what a model writes after one prompt: each token from a full pass over all before."""
    new = []
    while len(new) < num_tokens and not {*stop_ids} & {*new}:
        ids = torch.tensor([[*prompt, *new]])
        new.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    return new


def tunable(model, only=None):
    """All parameters that require a gradient (and are in `only`), as the engine would name them."""
    layout = find_blocks(model)
    ids = parameter_ids(name for name, _ in model.named_parameters())
    return [
        TrainedParameter(p, layout.block_of(name), Elements.all_of(ids[name], p.shape))
        for name, p in model.named_parameters()
        if p.requires_grad and (only is None or name in only)
    ]
