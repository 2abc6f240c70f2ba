"""Engines with an adapter on tiny models, and what tests of them look at."""

from __future__ import annotations

import torch
from tiny_models import FAMILIES, VOCABULARY
from tiny_runs import DS_CONFIG, SEED, make_batch, write_model, zo_config

from lezo_ds.config import PeftConfig
from lezo_ds.config.deepspeed import load_ds_config
from lezo_ds.data.objectives import classification_loss
from lezo_ds.engine import initialize
from lezo_ds.forward.batch import MicroBatch

TARGETS = {"gpt2": "c_attn", "gpt_neox": "query_key_value"}
PREFIX_LENGTH = 3


def peft_config(kind, family="opt"):
    """Return a small adapter's settings; LoRA's targets are those the family's attention has."""
    targets = TARGETS.get(family, "q_proj,v_proj")
    return PeftConfig(
        kind=kind, lora_rank=2, lora_alpha=5.0, lora_targets=targets, prefix_length=PREFIX_LENGTH
    )


def start_engine(directory, peft, dtype="fp32", num_ranks=1, **changes):
    """Return an engine that trains an adapter; one step moves it far, so that it matters to the logits."""
    torch.set_num_threads(1)
    ds_config = load_ds_config(DS_CONFIG, dtype, num_ranks, 2)
    config = zo_config(**({"learning_rate": 0.1, "perturbation_scale": 1e-2} | changes))
    return initialize(str(directory), config, ds_config, dtype, SEED, peft)


def train(engine, num_steps, vocabulary=VOCABULARY):
    """Do some steps of two micro-batches and return their records."""
    return [
        engine.train_batch(make_batch(engine.global_steps, 2, vocabulary=vocabulary), classification_loss)
        for _ in range(num_steps)
    ]


def whole_batch(vocabulary=VOCABULARY):
    """Return a micro-batch whose full logits are wanted."""
    (batch,) = make_batch(0, num_micro_batches=1, vocabulary=vocabulary)
    return MicroBatch(batch.inputs, batch.weight)


def write_families(families, root):
    """Write a tiny model of each family; return their directories by family."""
    return {family: write_model(FAMILIES[family][0], root / family) for family in families}
