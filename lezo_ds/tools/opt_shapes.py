"""The published sizes of OPT models, whose configurations are known without the Hugging Face hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import OPTConfig

VOCABULARY_SIZE = 50272
MAX_LENGTH = 2048
"""Longest input of an OPT model in tokens."""


class Shape(NamedTuple):
    """Size of an OPT model (Zhang et al. 2022, table 1); the feed-forward layers are four times `width`."""

    num_blocks: int
    width: int
    num_heads: int
    vocabulary_size: int = VOCABULARY_SIZE


SHAPES = {
    "opt-tiny": Shape(4, 32, 2),  # not published: small enough to try a command on any machine
    # Not published: the modules of opt-13b with hardly any weights, to measure what a step costs the host.
    "opt-13b-thin": Shape(40, 16, 2, vocabulary_size=512),
    "opt-125m": Shape(12, 768, 12),
    "opt-1.3b": Shape(24, 2048, 32),
    "opt-2.7b": Shape(32, 2560, 32),
    "opt-6.7b": Shape(32, 4096, 32),
    "opt-13b": Shape(40, 5120, 40),
    "opt-30b": Shape(48, 7168, 56),
    "opt-66b": Shape(64, 9216, 72),
    "opt-175b": Shape(96, 12288, 96),
}


def opt_config(shape: str, num_blocks: int | None = None) -> OPTConfig:
    """Return the configuration of an OPT model.

    Args:
        shape: a key of SHAPES.
        num_blocks: number of blocks, at least 1; None for the shape's own number.
    """
    from transformers import OPTConfig  # takes seconds to import; SHAPES alone does not need it

    size = SHAPES[shape]
    return OPTConfig(
        vocab_size=size.vocabulary_size,
        hidden_size=size.width,
        word_embed_proj_dim=size.width,
        ffn_dim=4 * size.width,
        num_hidden_layers=num_blocks or size.num_blocks,
        num_attention_heads=size.num_heads,
        max_position_embeddings=MAX_LENGTH,
    )
