"""A tiny random model of any architecture of transformers that writes text.

Each family uses the default config of its class with smaller sizes. `_SIZES` maps each size key to
its small value, and also applies to the parts of a multimodal config. `_OWN` has overrides by
family.
"""

from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

OF_IMAGES_OR_SOUND = (
    *("aria", "aya_vision", "cohere2_vision", "glm4v", "idefics3", "internvl", "lfm2_vl", "llava"),
    *("llava_next", "llava_onevision", "mistral3", "ovis2", "paligemma", "qwen2_5_vl"),
    *("qwen2_audio", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "voxtral"),
)
"""Some of the families that only `AutoModelForMultimodalLM` opens."""
KNOWN = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OF_IMAGES_OR_SOUND)

VOCABULARY = 64
TOKENS = range(4, 40)
"""Tokens that mean a word in every family. Those of images, and of ends, are among the others."""
NUM_LAYERS = 4

# Indexed attention takes all tokens: a choice among equal scores would depend on the padding.
_TABLE = """
 64 vocab_size decoder_vocab_size vocab_size_per_layer_input pronunciation_vocab_size
 64 shape_vocab_size
  4 num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers
  4 num_decoder_layers num_blocks depth conf_num_hidden_layers
 32 hidden_size d_model n_embd dim emb_dim embedding_dim lru_width embedding_size
 32 input_embedding_size output_embedding_size word_embed_proj_dim embed_dim out_hidden_size
 32 hidden_size_global intermediate_size_mlp adapter_in_dim adapter_out_dim projector_input_dim
 32 projector_output_dim pronunciation_embed_dim shape_embed_dim output_channels base_channels
 32 ext_pw_out_channel nemo_conv_channels depthwise_separable_out_channel
  4 num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads
  4 encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
  4 conf_num_attention_heads linear_num_heads linear_num_value_heads mamba_num_heads
  4 swa_num_attention_heads
  2 num_key_value_heads num_kv_heads kv_n_heads linear_num_key_heads n_groups
  2 swa_num_key_value_heads num_query_groups
  8 head_dim kv_channels linear_head_dim linear_key_head_dim linear_value_head_dim swa_head_dim
  8 qk_rope_head_dim global_head_dim dim_head d_head v_head_dim attention_head_size index_head_dim
  8 mamba_head_dim q_lora_rank kv_lora_rank laurel_rank hidden_size_per_layer_input mamba_d_head
  8 rotary_dim query_pre_attn_scalar
  4 qk_nope_head_dim index_n_heads mamba_n_heads time_step_rank mamba_dt_rank n_mamba_heads
  4 o_lora_rank gated_norm_rank adapter_rank d_rel
 48 intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff ffn_hidden_size d_inner dim_ff
 48 feed_forward_size dense_intermediate_size n_inner mlp_dim
 24 moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size
 24 expert_ffn_hidden_size moe_shared_expert_intermediate_size shared_experts_intermediate_size
  4 num_experts n_routed_experts num_local_experts moe_num_experts num_routed_experts
  2 num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k
  1 n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts
  1 first_k_dense_replace num_dense_layers moe_layer_start_index num_kv_shared_layers num_codebooks
  1 router_hidden_size
  8 state_size mamba_d_state ssm_state_size
 16 chunk_size mamba_chunk_size
256 max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length
256 max_target_positions rel_extent position_bias_max_distance
  8 sliding_window window_size sliding_window_size attention_window_size attention_chunk_size
  8 local_attention keep_window_size
 32 image_size
 16 patch_size
 64 index_topk
"""
_SIZES: dict[str, int] = {}
for _size, *_keys in map(str.split, _TABLE.strip().splitlines()):
    _SIZES.update(dict.fromkeys(_keys, int(_size)))

_SPECIAL = {
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "sep_token_id": 2,
    "eod_token_id": 2,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}
_FIRST_OTHER_TOKEN = 48

_ATTENTIONS = ("full_attention", "sliding_attention")
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_THREE_POSITIONS = {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}
_HEAD_DIM = {"head_dim": 8}
_MAMBA_HEAD = {"mamba_d_head": 16}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA_HEAD | {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": NUM_LAYERS},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(_ATTENTIONS, _ROPE)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 8,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 4,
        "swa_v_head_dim": 8,
    },
    "emu3": {"vocabulary_map": {"<image>": 48, "<|extra_200|>": 49}},
    "falcon_h1": _MAMBA_HEAD | {"mamba_d_ssm": 64},
    "gemma4_text": _HEAD_DIM | {"global_head_dim": 16},
    "gemma4_unified_text": _HEAD_DIM | {"global_head_dim": 16},
    "glm4v_text": _THREE_POSITIONS,
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]],
        "attention_layers": ["global", "local"] * 2,
    },
    "granitemoehybrid": _MAMBA_HEAD | {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": _HEAD_DIM,
    "hunyuan_v1_moe": _HEAD_DIM | {"num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "ministral": _HEAD_DIM,
    "nemotron": _HEAD_DIM | {"num_key_value_heads": 2},
    "qwen2_5_vl_text": _THREE_POSITIONS,
    "qwen2_vl_text": _THREE_POSITIONS,
    "qwen3_vl_moe_text": _THREE_POSITIONS,
    "qwen3_vl_text": _THREE_POSITIONS,
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_embds_dim": [8, 24],
        "axial_pos_shape": [16, 16],
    },
    "xmod": {"default_language": "en_XX"},
}

_DRAFTS = "it is a draft model that needs another model's states"
_CODES = "it generates audio codes, and AutoModelForCausalLM does not open the published config"
NOT_BUILT = {
    "blt": "a second model finds its patches, and it has no num_hidden_layers",
    "dots3_note": "its audio tower's default config cannot be shrunk",
    "gemma3n": "its vision tower needs timm",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "musicgen": _CODES,
    "musicgen_melody": _CODES,
    "xlstm": "its states cannot be shrunk",
}
"""Families without a tiny model here, and why."""


def small_config(family: str) -> Any:
    """Return a config of a family with small numbers."""
    config_class = CONFIG_MAPPING[family]
    return config_class(**_changes(config_class()))


def _changes(default: Any) -> dict[str, Any]:
    """Return the overrides that shrink a config and its parts."""
    values = default.to_dict()
    num_layers = values.get("num_hidden_layers")
    changes: dict[str, Any] = {}
    other_token = _FIRST_OTHER_TOKEN
    for key, value in values.items():
        if key in default.sub_configs and isinstance(value, dict):
            part = getattr(default, key)
            changes[key] = _changes(part) | {"model_type": part.model_type}
        elif key in _SPECIAL:
            if value is not None:
                changes[key] = _SPECIAL[key]
        elif key.endswith(("token_id", "token_index")) and isinstance(value, int):
            changes[key] = other_token
            other_token += 1
        elif isinstance(value, list) and value and len(value) == num_layers:
            changes[key] = [_smaller(key, each) for each in _of_fewer_layers(value)]
        elif key in _SIZES:
            changes[key] = _smaller(key, value)
    if "kv_lora_rank" in values:
        # Multi-head latent attention has keys and values for each head.
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    if "is_decoder" in values:
        changes["is_decoder"] = True
    return changes | _OWN.get(default.model_type, {})


def _smaller(key: str, value: Any) -> Any:
    is_size = key in _SIZES and isinstance(value, int) and not isinstance(value, bool)
    return min(value, _SIZES[key]) if is_size else value


def _of_fewer_layers(values: list[Any]) -> list[Any]:
    """Return a list with an entry for each layer, with every kind of entry in turn."""
    kinds = list(dict.fromkeys(values))
    if len(kinds) == len(values):
        return values[:NUM_LAYERS]
    return [kinds[layer % len(kinds)] for layer in range(NUM_LAYERS)]


def opened_by(family: str) -> Any:
    """Return the class of transformers that opens the directory of a family."""
    if family in OF_IMAGES_OR_SOUND:
        return transformers.AutoModelForMultimodalLM
    return transformers.AutoModelForCausalLM


def published_class(family: str) -> Any:
    name = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(family)
    name = name or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    return getattr(transformers, name)
