"""Notices when a weight changes by itself: a flipped bit, or a stray write by other code."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ShardGuard:
    """The bit sums of a rank's shards, as whoever updates them left them.

    Results stay on the device until `suspects` is asked for, so that updates need not wait for it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._looks: list[tuple[str, Tensor]] = []
        self._suspects: list[str] = []

    def accept(self, name: str, shard: Tensor, low: Tensor | None) -> None:
        """Take a parameter's shard, and its low bits, as they are now."""
        self._sums[name] = _sum_of(shard, low)

    def look(self, name: str, shard: Tensor, low: Tensor | None) -> None:
        """Compare a parameter's shard, and its low bits, with what was accepted."""
        self._looks.append((name, self._sums[name] != _sum_of(shard, low)))

    @property
    def suspects(self) -> list[str]:
        """Names of the parameters that a look has found changed."""
        if self._looks:
            changed = torch.stack([has_changed for _, has_changed in self._looks]).tolist()
            names = [name for (name, _), is_one in zip(self._looks, changed, strict=True) if is_one]
            self._suspects += [name for name in names if name not in self._suspects]
            self._looks.clear()
        return self._suspects

    def sums(self) -> list[int]:
        """Return what was accepted, in the order of the parameters' names."""
        return torch.stack([self._sums[name] for name in sorted(self._sums)]).tolist()


def _sum_of(shard: Tensor, low: Tensor | None) -> Tensor:
    return bit_sum(shard) if low is None else bit_sum(shard) + bit_sum(low)


def bit_sum(values: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as 64-bit integers, modulo 2**64: int64 [].

    Any one changed bit changes it, by a power of two. It costs one reading of the memory.

    Args:
        values: flat and contiguous, of any dtype of 1 to 8 bytes.
    """
    width = 8 // values.element_size()
    whole = values.numel() // width * width if values.storage_offset() % width == 0 else 0
    rest = values[whole:].view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)
    return values[:whole].view(torch.int64).sum() + rest if whole else rest
