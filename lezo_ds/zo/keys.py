"""Every key that is derived from a run's seed.

`seed` means the number in the recipe and nothing else. What is derived from it is a key: an unsigned 64-bit
integer that names one stream of random numbers. Keys are hashes, so that no two steps or runs share one:
sums such as seed + step collide between runs (run 0 at step 1 is run 1 at step 0).
"""

from __future__ import annotations

import hashlib
from fractions import Fraction


def step_key(seed: int, step: int) -> int:
    """Return the key of a step's noise.

    Args:
        seed: of the run.
        step: index of the step, from 0.
    """
    return _key(f"lezo_ds noise 1|{seed}|{step}")


def direction_key(key: int, direction: int) -> int:
    """Return the key of one of a step's directions: the step's own key for the first, else a hash of it.

    Args:
        key: of the step.
        direction: index of the direction, from 0.
    """
    return key if direction == 0 else _key(f"lezo_ds direction 1|{key}|{direction}")


def layer_order(seed: int, step: int, num_layers: int) -> list[int]:
    """Return the indices of all transformer blocks in a random order, the same on every machine.

    Args:
        seed: of the run.
        step: index of the step, from 0.
        num_layers: number of transformer blocks.
    """

    def rank(layer: int) -> bytes:
        return _digest(f"lezo_ds dropped layers 1|{seed}|{step}|{layer}", size=16)

    return sorted(range(num_layers), key=rank)


def layer_start(seed: int, step: int) -> Fraction:
    """Return a multiple of 2**-64, uniform in [0, 1), from which a step's blocks are sampled.

    Args:
        seed: of the run.
        step: index of the step, from 0.
    """
    return Fraction(_key(f"lezo_ds sampled layers 1|{seed}|{step}"), 2**64)


def dropout_key(seed: int, step: int, micro_batch: int) -> int:
    """Return the key of the dropout masks of a micro-batch (first-order training only)."""
    return step_key(step_key(seed, step), micro_batch)


def sample_key(seed: int, step: int, example: int, sample: int) -> int:
    """Return the key of the random numbers with which one answer is drawn, 0 to 2**63 - 1.

    It is the same for all probes of a step: they then differ in their weights only.

    Args:
        seed: of the run.
        step: index of the step, from 0.
        example: row of the record in its split.
        sample: index of the answer among those of the example, from 0.
    """
    return _key(f"lezo_ds sample 1|{seed}|{step}|{example}|{sample}") >> 1  # it must fit into an int64 tensor


def adapter_key(seed: int) -> int:
    """Return the key of the initial values of LoRA adapters."""
    return _key(f"lezo_ds adapter 1|{seed}")


def prefix_key(seed: int, position: int) -> int:
    """Return the key of the token whose keys and values a prefix starts from, at one position."""
    return int.from_bytes(_digest(f"lezo_ds prefix 1|{seed}|{position}", size=64)[:8], "little")


def _key(text: str) -> int:
    return int.from_bytes(_digest(text, size=8), "little")


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
