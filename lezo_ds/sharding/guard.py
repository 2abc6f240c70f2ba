"""Notices when a weight changes by itself: a flipped bit, or a stray write by other code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lezo_ds.noise.bit_sum import MODULUS, bit_sum


class ShardGuard:
    """The bit sums of a rank's shards, low bits included, as whoever updates them left them.

    Results stay on the device until `suspects` is asked for, so that updates need not wait for it.

    Args:
        names: of all parameters.
        device: of their shards.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._rows = {name: row for row, name in enumerate(names)}
        self._right = torch.zeros(len(names), dtype=torch.int64, device=device)
        self._changed = torch.zeros(len(names), dtype=torch.bool, device=device)
        self._sums = torch.zeros(len(names), 2, dtype=torch.int64, device=device)
        self._updated: list[int] = []

    def accept(self, name: str, shard: Tensor, low: Tensor | None) -> None:
        """Take a parameter's shard as it is now."""
        self._right[self._rows[name]] = bit_sum(shard, low)

    def look(self, name: str, shard: Tensor, low: Tensor | None) -> None:
        """Compare a parameter's shard with what it must be."""
        row = self._rows[name]
        self._changed[row] |= self._right[row] != bit_sum(shard, low)

    def sums_of(self, name: str) -> Tensor:
        """Return int64 [2] to which an update of this shard adds its bit sums, before and after."""
        self._updated.append(self._rows[name])
        return self._sums[self._updated[-1]]

    def finish_updates(self) -> None:
        """Compare what the updates found with what it must be, and take what they left."""
        if not self._updated:
            return
        rows = torch.tensor(self._updated, device=self._sums.device)
        before, after = (self._sums[rows] % MODULUS).unbind(dim=1)
        self._changed[rows] |= self._right[rows] != before
        self._right[rows] = after
        self._sums.zero_()
        self._updated.clear()

    @property
    def suspects(self) -> list[str]:
        """Names of the parameters that a look or an update has found changed."""
        return [name for name, changed in zip(self._rows, self._changed.tolist(), strict=True) if changed]

    def sums(self) -> list[int]:
        """Return what the bit sums must be, in the order of the parameters."""
        return self._right.tolist()
