"""Engines with an adapter on tiny models, and what tests of them look at."""

import tiny_runs
from tiny_models import VOCABULARY
from tiny_runs import make_batch

from lezo_ds.config import PeftConfig
from lezo_ds.forward.batch import MicroBatch

TARGETS = {"gpt2": "c_attn", "gpt_neox": "query_key_value"}
PREFIX_LENGTH = 3
SPLIT = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 0}}
"""What makes two ranks split the weights in DeepSpeed's configuration."""


def peft_config(kind, family="opt"):
    targets = TARGETS.get(family, "q_proj,v_proj")
    return PeftConfig(
        kind=kind, lora_rank=2, lora_alpha=5.0, lora_targets=targets, prefix_length=PREFIX_LENGTH
    )


def start_engine(directory, peft, dtype="fp32", num_ranks=1, **changes):
    """Return an engine that trains an adapter; one step moves it far."""
    far = {"learning_rate": 0.1, "perturbation_scale": 1e-2}
    return tiny_runs.start_engine(directory, dtype, num_ranks, peft=peft, **(far | changes))


def train(engine, num_steps, vocabulary=VOCABULARY):
    return tiny_runs.train(engine, num_steps, 2, vocabulary)


def whole_batch(vocabulary=VOCABULARY):
    (batch,) = make_batch(0, num_micro_batches=1, vocabulary=vocabulary)
    return MicroBatch(batch.inputs, batch.weight)
