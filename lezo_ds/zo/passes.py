"""The forward passes of a step: which probes of a micro-batch run at once, and on which rank."""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """One forward pass: one micro-batch, copied once for each of its consecutive probes.

    Attributes:
        micro_batch: index among the micro-batches of the step.
        probes: indices of its probes among those of the step.
        counts: whether this rank contributes the losses. It does not if another rank runs the
            same pass and has them: this rank then only takes part in the gathers of weights.
    """

    micro_batch: int
    probes: range
    counts: bool = True


def passes_of_step(num_micro_batches: int, num_probes: int, probes_per_pass: int) -> list[Pass]:
    """Return all forward passes of a step; rank r runs passes r, r + world, r + 2 world, and so on.

    A pass gathers each weight once for all of its probes.

    >>> [(each.micro_batch, list(each.probes)) for each in passes_of_step(1, 4, 2)]
    [(0, [0, 1]), (0, [2, 3])]
    """
    passes = []
    for micro_batch in range(num_micro_batches):
        for start in range(0, num_probes, probes_per_pass):
            stop = min(start + probes_per_pass, num_probes)
            passes.append(Pass(micro_batch, range(start, stop)))
    return passes
