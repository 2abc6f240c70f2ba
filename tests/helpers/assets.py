"""Small inputs of a real run: a random OPT with its own tokenizer, a data set in SST-2's schema, a recipe."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import yaml
from tiny_runs import write_model
from transformers import OPTConfig

from lezo_ds.tools.demo.offline.corpus import labelled_reviews, vocabulary
from lezo_ds.tools.demo.offline.tokenizer import build_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_BLOCKS = 4
NUM_POSITIONS = 64


def shared_asset(name):
    """Return a file or folder of the test assets, which are too large to be part of the repository."""
    path = Path(os.environ.get("LEZO_TEST_ASSETS", REPOSITORY.parent / "shared")) / name
    if not path.exists():
        pytest.skip(f"{path} does not exist; set LEZO_TEST_ASSETS to the folder that holds {name}")
    return path


def write_reader(directory, num_blocks=NUM_BLOCKS, seed=0):
    """Write a random OPT of 4 blocks x 16 (or another number of blocks) and its word-level tokenizer."""
    tokenizer = build_tokenizer(vocabulary())
    tokenizer.save_pretrained(directory)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=32,
        num_hidden_layers=num_blocks,
        num_attention_heads=4,
        max_position_embeddings=NUM_POSITIONS,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )
    return write_model(config, directory, seed=seed)


def write_records(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_data(directory, num_train=60, num_validation=30):
    rng = random.Random(0)
    write_records(directory / "train.jsonl", labelled_reviews(rng, num_train))
    write_records(directory / "validation.jsonl", labelled_reviews(rng, num_validation))
    return directory


def recipe_values(model, data):
    """Return a run of 8 steps on 4 micro-batches each, evaluated every 4."""
    return {
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"task": "sst2", "path": str(data), "num_train": 30, "num_dev": 11, "num_test": 13},
        "zo": {"learning_rate": 1e-3, "sparsity": 0.5},
        "train": {"steps": 8, "batch_size": 8, "micro_batch_size": 2, "eval_batch_size": 4, "eval_every": 4},
        "deepspeed": str(REPOSITORY / "ds_configs" / "zero3_cpu.json"),
    }


def write_recipe(directory):
    """Write a model, data and a recipe that names them below `directory`; return the recipe's path."""
    values = recipe_values(write_reader(directory / "model"), write_data(directory / "data"))
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def write_recipe_without_weights(directory):
    """Write what `write_recipe` does, but the recipe's model has no weights; `whole_model` has them."""
    write_recipe(directory)
    shutil.copytree(directory / "model", directory / "whole_model")
    (directory / "model" / "model.safetensors").unlink()
