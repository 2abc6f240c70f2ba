"""The published sizes of OPT, Llama and Qwen models, so that they can be planned for without the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from lezo_ds.tools.opt_shapes import SHAPES, opt_config

_OWNERS = ("", "facebook", "meta-llama", "Qwen")
_VARIANTS = ("-instruct", "-base", "-hf", "-chat")


class _Sizes(NamedTuple):
    """Sizes of a decoder with gated feed-forward layers, as its config.json on the hub has them."""

    vocabulary: int
    width: int
    feed_forward: int
    num_blocks: int
    num_heads: int
    num_key_value_heads: int
    head_width: int = 128
    tied: bool = False
    max_length: int = 131_072


_GATED: dict[str, dict[str, _Sizes]] = {
    "LlamaConfig": {
        "llama-2-7b": _Sizes(32_000, 4096, 11_008, 32, 32, 32, max_length=4096),
        "llama-2-13b": _Sizes(32_000, 5120, 13_824, 40, 40, 40, max_length=4096),
        "llama-2-70b": _Sizes(32_000, 8192, 28_672, 80, 64, 8, max_length=4096),
        "llama-3.2-1b": _Sizes(128_256, 2048, 8192, 16, 32, 8, head_width=64, tied=True),
        "llama-3.2-3b": _Sizes(128_256, 3072, 8192, 28, 24, 8, tied=True),
        "llama-3.1-8b": _Sizes(128_256, 4096, 14_336, 32, 32, 8),
        "llama-3.1-70b": _Sizes(128_256, 8192, 28_672, 80, 64, 8),
        "llama-3.1-405b": _Sizes(128_256, 16_384, 53_248, 126, 128, 8),
    },
    "Qwen2Config": {
        "qwen2.5-0.5b": _Sizes(151_936, 896, 4864, 24, 14, 2, head_width=64, tied=True, max_length=32_768),
        "qwen2.5-7b": _Sizes(152_064, 3584, 18_944, 28, 28, 4, max_length=131_072),
        "qwen2.5-14b": _Sizes(152_064, 5120, 13_824, 48, 40, 8, max_length=131_072),
        "qwen2.5-32b": _Sizes(152_064, 5120, 27_648, 64, 40, 8, max_length=131_072),
        "qwen2.5-72b": _Sizes(152_064, 8192, 29_568, 80, 64, 8, max_length=131_072),
    },
    "Qwen3Config": {
        "qwen3-0.6b": _Sizes(151_936, 1024, 3072, 28, 16, 8, tied=True, max_length=40_960),
        "qwen3-1.7b": _Sizes(151_936, 2048, 6144, 28, 16, 8, tied=True, max_length=40_960),
        "qwen3-4b": _Sizes(151_936, 2560, 9728, 36, 32, 8, tied=True, max_length=40_960),
        "qwen3-8b": _Sizes(151_936, 4096, 12_288, 36, 32, 8, max_length=40_960),
        "qwen3-14b": _Sizes(151_936, 5120, 17_408, 40, 40, 8, max_length=40_960),
        "qwen3-32b": _Sizes(151_936, 5120, 25_600, 64, 64, 8, max_length=40_960),
    },
}
"""Sizes by the name of the configuration's class in transformers and by the model's name."""

MODELS = (*SHAPES, *(name for models in _GATED.values() for name in models))
"""Names of all models whose sizes are known."""


def published_name(path: str) -> str | None:
    """Return the name in MODELS of a model on the hub; None if it is not there, or a directory has its name.

    >>> [published_name(path) for path in ("Qwen/Qwen3-8B", "meta-llama/Llama-3.2-1B-Instruct", "me/opt-66b")]
    ['qwen3-8b', 'llama-3.2-1b', None]
    """
    owner, _, name = path.rpartition("/")
    name = name.lower()
    for variant in _VARIANTS:
        name = name.removesuffix(variant)
    return name if owner in _OWNERS and name in MODELS and not Path(path).is_dir() else None


def published_config(name: str) -> Any:  # noqa: ANN401  # a configuration of transformers
    """Return the configuration of a model in MODELS, as far as its sizes depend on it."""
    import transformers  # takes seconds to import; the names alone do not need it

    if name in SHAPES:
        return opt_config(name)
    (class_name, sizes), *_ = [(kind, models[name]) for kind, models in _GATED.items() if name in models]
    own = {} if class_name == "Qwen2Config" else {"head_dim": sizes.head_width}
    return getattr(transformers, class_name)(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.num_blocks,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        max_position_embeddings=sizes.max_length,
        tie_word_embeddings=sizes.tied,
        **own,
    )
