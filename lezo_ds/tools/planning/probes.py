"""How often a zeroth-order step runs the model, and on how many perturbed copies of a weight at a time."""

from __future__ import annotations

from lezo_ds.config import ZEROTH_ORDER, RunConfig


def num_passes(config: RunConfig) -> int:
    """Return the number of forward passes in a step over all ranks: one per micro-batch and direction."""
    return config.train.batch_size // config.train.micro_batch_size * config.zo.directions


def copies_per_pass(config: RunConfig) -> int:
    """Return how many perturbed copies of the weights one training pass runs, each on its own batch.

    The dual forward runs theta + mu z and theta - mu z on a doubled batch. Methods other than LeZO and MeZO
    run the weights themselves, once.
    """
    return 2 if config.method in ZEROTH_ORDER and config.zo.forward == "dual" else 1
