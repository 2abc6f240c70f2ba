"""The examples of each training step, as a pure function of the seed and the step."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def batch_indices(seed: int, step: int, num_examples: int, batch_size: int) -> list[int]:
    """Return the indices of one step's examples.

    Examples come from an endless stream: one permutation of all examples after another, one for each epoch.
    Step t takes the positions t * batch_size to (t + 1) * batch_size - 1. A batch may therefore end one
    epoch and begin the next, no example is dropped, and a resumed run does not have to skip through data.

    Args:
        seed: 0 to 2**64 - 1.
        step: from 0.
        num_examples: size of the training set, at least 1.
        batch_size: number of examples in a batch, at least 1.

    Returns:
        batch_size indices, each 0 to num_examples - 1.

    Raises:
        ValueError: an argument is out of range.

    >>> sorted(batch_indices(seed=0, step=0, num_examples=3, batch_size=3))
    [0, 1, 2]
    """
    if not (0 <= seed < 2**64 and step >= 0 and num_examples >= 1 and batch_size >= 1):
        raise ValueError(f"batch_indices({seed=}, {step=}, {num_examples=}, {batch_size=})")
    first = step * batch_size
    epochs = range(first // num_examples, (first + batch_size - 1) // num_examples + 1)
    stream = np.concatenate([_permutation(seed, epoch, num_examples) for epoch in epochs])
    start = first - epochs.start * num_examples
    batch: list[int] = stream[start : start + batch_size].tolist()
    return batch


@lru_cache(maxsize=2)  # a step reads at most two epochs, unless a batch is larger than the training set
def _permutation(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    # NumPy guarantees the raw words of Philox4x64 (Salmon et al. 2011) across versions, but not the result
    # of Generator.permutation. Sorting the words gives a permutation that never changes.
    words = np.random.Philox(key=seed + (epoch << 64)).random_raw(num_examples)
    return np.argsort(words, kind="stable")
