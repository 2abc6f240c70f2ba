"""How often a zeroth-order step runs the model, and on how many perturbed copies of a weight at a time."""

from __future__ import annotations

from lezo_ds import config as run_config
from lezo_ds.config import ZEROTH_ORDER, RunConfig, num_passes

__all__ = ["copies_per_pass", "num_passes"]


def copies_per_pass(config: RunConfig) -> int:
    """Return how many perturbed copies of the weights one training pass runs, each on its own batch.

    The dual forward runs theta + mu z and theta - mu z on a doubled batch. Methods other than LeZO and MeZO
    run the weights themselves, once.
    """
    return run_config.copies_per_pass(config.zo) if config.method in ZEROTH_ORDER else 1
