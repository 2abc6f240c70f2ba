"""Contiguous windows: the blocks that a step perturbs lie next to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lezo_ds.zo.keys import layer_order
from lezo_ds.zo.layers.base import LayerPolicy, LayerSample
from lezo_ds.zo.records import StepRecord


@dataclass(frozen=True)
class Window(LayerPolicy):
    """Perturbs one window of adjacent blocks and drops all others.

    The first block of the window is drawn uniformly, and the window wraps around from the last block to the
    first, so that every block is perturbed equally often. The blocks before a window that does not wrap are
    the same for all probes of a step.
    """

    def sample(self, seed: int, records: Sequence[StepRecord]) -> LayerSample:
        """Return the sample of the next step."""
        start = layer_order(seed, step=len(records), num_layers=self.num_layers)[0]
        kept = {(start + offset) % self.num_layers for offset in range(self.num_kept)}
        return LayerSample(dropped=tuple(layer for layer in range(self.num_layers) if layer not in kept))
