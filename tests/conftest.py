"""What all tests share: the environment of a CPU rank, and tiny models on disk."""

from __future__ import annotations

import os

# Before anything imports torch or deepspeed: they look at these once.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch
from assets import write_recipe
from tiny_runs import NUM_BLOCKS, VOCABULARY, write_model
from transformers import OPTConfig

# A busy machine is not a failure: no example has a deadline, and pytest's timeout ends a test that hangs.
hypothesis.settings.register_profile("any load", deadline=None)
hypothesis.settings.load_profile("any load")

TINY_OPT = OPTConfig(
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=1,
    vocab_size=VOCABULARY,
    # Odd sizes: on 2 or 4 ranks the last shard of every parameter is padded.
    hidden_size=33,
    word_embed_proj_dim=33,
    num_attention_heads=3,
    ffn_dim=65,
    num_hidden_layers=NUM_BLOCKS,
    max_position_embeddings=61,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="session")
def opt_directory(tmp_path_factory):
    """A tiny random OPT with a tied head, in fp32."""
    return write_model(TINY_OPT, tmp_path_factory.mktemp("opt_fp32"), torch.float32)


@pytest.fixture(scope="session")
def opt_fp16_directory(tmp_path_factory):
    """The same weights, stored in fp16."""
    return write_model(TINY_OPT, tmp_path_factory.mktemp("opt_fp16"), torch.float16)


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    """A recipe of 8 steps, with its model and data in the same directory."""
    return write_recipe(tmp_path_factory.mktemp("assets"))
