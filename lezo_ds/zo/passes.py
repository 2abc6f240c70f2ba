"""The forward passes of a step: which probes of which micro-batch run at once, and on which rank."""

from __future__ import annotations

from typing import NamedTuple


class Pass(NamedTuple):
    """One forward pass: one micro-batch, copied once for each of its consecutive probes."""

    micro_batch: int
    probes: range
    counts: bool = True
    """False if another rank runs it, too, and has the losses: this one only takes part in the gathers."""


def passes_of_step(num_micro_batches: int, num_probes: int, probes_per_pass: int) -> list[Pass]:
    """Return all forward passes of a step; rank r runs passes r, r + world, r + 2 world, and so on.

    A pass gathers each weight once for all of its probes.

    >>> [(one.micro_batch, list(one.probes)) for one in passes_of_step(1, 4, 2)]
    [(0, [0, 1]), (0, [2, 3])]
    """
    starts = range(0, num_probes, probes_per_pass)
    return [
        Pass(micro_batch, range(start, min(start + probes_per_pass, num_probes)))
        for micro_batch in range(num_micro_batches)
        for start in starts
    ]
