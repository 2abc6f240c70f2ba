"""Every key that is derived from a run's seed.

`seed` means the number in the recipe and nothing else. A key is an unsigned 64-bit integer that
names one stream of random numbers. Keys are hashes, so that no two steps or runs share one: sums
such as seed + step collide between runs (run 0 at step 1 is run 1 at step 0).

Each hashed text begins with its purpose and a version, so that two purposes never share a stream.
These texts never change: replays derive the same keys from them (see docs/file-formats.md).
"""

from __future__ import annotations

import functools
import hashlib


def step_key(seed: int, step: int) -> int:
    """Return the key of a step's noise."""
    return _key(f"lezo_ds noise 1|{seed}|{step}")


def direction_key(key: int, direction: int) -> int:
    """Return the key of one direction of a step: the step's key for direction 0, else its hash."""
    if direction == 0:
        return key
    return _key(f"lezo_ds direction 1|{key}|{direction}")


# The passes of a step and its update need the same keys.
@functools.lru_cache(maxsize=1)
def direction_keys(key: int, number: int) -> tuple[int, ...]:
    """Return the keys of the first directions of a step."""
    return tuple(direction_key(key, direction) for direction in range(number))


def layer_order(seed: int, step: int, num_layers: int) -> list[int]:
    """Return the indices of all transformer blocks in a random order, the same on every machine."""

    def rank(layer: int) -> bytes:
        return _digest(f"lezo_ds dropped layers 1|{seed}|{step}|{layer}", size=16)

    return sorted(range(num_layers), key=rank)


def sample_key(seed: int, step: int, example: int, sample: int) -> int:
    """Return the key, 0 to 2**63 - 1, with which an answer is drawn, the same at all probes.

    Args:
        seed: the run's seed.
        step: index of the step.
        example: index of the prompt in its split.
        sample: index among the answers to this prompt in the step, also if its batch repeats it.
    """
    key = _key(f"lezo_ds sample 1|{seed}|{step}|{example}|{sample}")
    # Batches carry it in an int64 tensor.
    return key >> 1


def adapter_key(seed: int) -> int:
    """Return the key of the initial values of LoRA adapters."""
    return _key(f"lezo_ds adapter 1|{seed}")


def prefix_key(seed: int, position: int) -> int:
    """Return the key of the token whose keys and values a prefix starts from, at one position."""
    digest = _digest(f"lezo_ds prefix 1|{seed}|{position}", size=64)
    return int.from_bytes(digest[:8], "little")


def _key(text: str) -> int:
    return int.from_bytes(_digest(text, size=8), "little")


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
