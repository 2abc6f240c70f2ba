"""Tiny models on disk, batches for them, and an engine on them: what tests of training need."""

from pathlib import Path

import torch
from tiny_models import random_model
from transformers import OPTConfig

from lezo_ds.config import ZoConfig
from lezo_ds.config.deepspeed import load_ds_config
from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.examples import EncodedExample
from lezo_ds.data.objectives import classification_loss
from lezo_ds.journal import Header, Journal
from lezo_ds.runs.own_loop import initialize

NUM_BLOCKS = 4
VOCABULARY = 101
PAD_ID = 1
SEED = 11
CANDIDATES = (17, 42)
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
DS_CONFIG = Path(__file__).parents[2] / "ds_configs" / "zero3_cpu.json"


def write_model(config, directory, dtype=torch.float32, seed=0):
    random_model(config, dtype, seed).save_pretrained(directory)
    return directory


def make_batch(step, num_micro_batches=4, examples=2, vocabulary=VOCABULARY):
    """Return a step's micro-batches of random tokens, a pure function of `step`."""
    generator = torch.Generator().manual_seed(step)

    def example():
        length = int(torch.randint(5, 16, (), generator=generator))
        context = tuple(torch.randint(3, vocabulary, (length,), generator=generator).tolist())
        label = int(torch.randint(0, 2, (), generator=generator))
        mask = (False,) * length + (True,)
        return EncodedExample(tuple((*context, c) for c in CANDIDATES), (mask, mask), label)

    return [
        candidate_batch([example() for _ in range(examples)], PAD_ID)
        for _ in range(num_micro_batches)
    ]


def start_engine(directory, dtype="fp32", num_ranks=1, ds_changes=(), peft=None, **changes):
    """Return an engine on a tiny model, as the trainer starts it.

    Half of the blocks are dropped, and a step shows.
    """
    torch.set_num_threads(1)
    ds_config = load_ds_config(DS_CONFIG, dtype, num_ranks, 2) | dict(ds_changes)
    own = {
        name: changes.pop(name, None) for name in ("partition_size", "num_steps", "bits", "run_dir")
    }
    settings = {"learning_rate": 1e-3, "perturbation_scale": 1e-3, "sparsity": 0.5} | changes
    return initialize(str(directory), ZoConfig(**settings), ds_config, dtype, SEED, peft, **own)


HEADER = Header(
    noise_version=1, model_fingerprint="f", parameter_table_hash="t", config={}, libraries={}
)


def attach_new_journal(engine, path):
    if engine.global_rank == 0:
        engine.journal = Journal.create(path, HEADER)


def train(engine, num_steps, num_micro_batches=4, vocabulary=VOCABULARY):
    records = []
    for _ in range(num_steps):
        batch = make_batch(engine.global_steps, num_micro_batches, vocabulary=vocabulary)
        records.append(engine.train_batch(batch, classification_loss))
    return records


def gathered_low_bits(weights, shard):
    """Return all low bits of a parameter, int16 of its shape, or None. A collective."""
    if shard.name not in weights.low_bits:
        return None
    return shard.gather_like(weights.low_bits[shard.name])


def full_weights(engine):
    """Return the full parameters by name, and their low bits as `name.low`. A collective."""
    weights = {}
    for shard in engine.weights.shards:
        weights[shard.name] = shard.gather()
        low = gathered_low_bits(engine.weights, shard)
        if low is not None:
            weights[shard.name + ".low"] = low
    return weights
