"""The published sizes of OPT models, for which a plan or a benchmark needs no checkpoint."""

from __future__ import annotations

from transformers import OPTConfig

OPT_SHAPES = {
    "opt-tiny": (4, 32, 2),  # not published: small enough to try a command on any machine
    "opt-125m": (12, 768, 12),
    "opt-1.3b": (24, 2048, 32),
    "opt-2.7b": (32, 2560, 32),
    "opt-6.7b": (32, 4096, 32),
    "opt-13b": (40, 5120, 40),
    "opt-30b": (48, 7168, 56),
    "opt-66b": (64, 9216, 72),
}
"""Numbers of blocks, width and number of heads (Zhang et al. 2022, table 1)."""


def opt_config(shape: str, num_blocks: int | None = None) -> OPTConfig:
    """Return the configuration of an OPT model; None takes the shape's own number of blocks."""
    blocks, width, num_heads = OPT_SHAPES[shape]
    return OPTConfig(
        vocab_size=50272,
        hidden_size=width,
        word_embed_proj_dim=width,
        ffn_dim=4 * width,
        num_hidden_layers=num_blocks or blocks,
        num_attention_heads=num_heads,
        max_position_embeddings=2048,
    )
