"""Samples of blocks in which each block has a probability of its own, and the factors that make up for it.

All arithmetic is exact, so that a sample always has the right number of blocks, and the probability of each
is what it is said to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from lezo_ds.zo.keys import layer_order, layer_start
from lezo_ds.zo.layers.base import LayerSample


def kept_probabilities(weights: Sequence[float], num_kept: int) -> list[Fraction]:
    """Return a probability of each block, as proportional to the weights as the limit of 1 allows.

    A block whose share is above 1 gets 1, and the others share the rest.

    Args:
        weights: of the blocks, finite and at least 0. If all are 0, they count as equal.
        num_kept: sum of the probabilities, 0 to the number of weights.

    >>> [str(probability) for probability in kept_probabilities([1, 1, 2, 8], 2)]
    ['1/4', '1/4', '1/2', '1']
    """
    exact = [Fraction(weight) for weight in weights]
    found = [Fraction(0)] * len(exact)
    left, remaining = set(range(len(exact))), Fraction(num_kept)
    while left:
        total = sum(exact[block] for block in left)
        for block in left:
            found[block] = remaining * (exact[block] / total if total else Fraction(1, len(left)))
        above = {block for block in left if found[block] > 1}
        if not above:
            break
        for block in above:
            found[block] = Fraction(1)
        left, remaining = left - above, remaining - len(above)
    return found


def weighted_sample(seed: int, step: int, probabilities: Sequence[Fraction]) -> LayerSample:
    """Keep each block with its probability, and weight its update by (m / L) / probability.

    m of L blocks are kept. A block's update thus has the same mean as if all were equally likely: the policy
    changes the variance of the estimate and not its mean.

    Systematic sampling (Madow 1949) in a random order of the blocks: the probabilities are laid end to end on
    a line, and the blocks that hold the points u, u + 1, u + 2, ... are kept, with u uniform in [0, 1).

    Args:
        seed: of the run.
        step: index of the step, from 0.
        probabilities: of the blocks, at most 1; their sum m is a whole number. A block with 0 has weight 0.
    """
    num_layers = len(probabilities)
    order = layer_order(seed, step, num_layers)
    start = layer_start(seed, step)
    ends = list(accumulate(probabilities[layer] for layer in order))
    # A block holds a point if the number of points below its end is not that below its start.
    points = [0, *(-((start - end) // 1) for end in ends)]
    dropped = [layer for index, layer in enumerate(order) if points[index] == points[index + 1]]
    mean = Fraction(sum(probabilities), num_layers)
    return LayerSample(
        dropped=tuple(sorted(dropped)),
        weights=tuple(float(mean / p) if p else 0.0 for p in probabilities),
    )
