"""Shards of quantized matrices: they store codes, and are read as the values that modules use."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lezo_ds.noise import UpdateTarget
from lezo_ds.sharding.quantization import GROUP, Quantization
from lezo_ds.sharding.shards import FlatShard, RectangleShard, Shard


class QuantizedShard(Shard):
    """Stores the codes of some elements. Those of 8 bits may be updated."""

    @property
    def quantization(self) -> Quantization:
        """How the elements are stored."""
        quantization: Quantization = self.parameter.quantization
        return quantization

    def stored(self) -> Tensor:
        """Return a copy of the elements, in the dtype that modules compute with."""
        return self.quantization.dequantize(self._part)[: self.count]

    def fill(self, values: Tensor) -> None:
        """Quantize values [count] of any dtype, and store their codes."""
        if self.count:
            self.quantization.quantize_(self._part, values)

    def trained_codes(self) -> Tensor | None:
        if not self.is_trained:
            return None
        codes, _ = self.quantization.codes_and_grid(self._part)
        return codes[: self.count]

    def target(self, low: Tensor | None = None) -> UpdateTarget:
        codes, grid = self.quantization.codes_and_grid(self._part)
        return UpdateTarget(codes[: self.count], self.elements, low, grid)

    @property
    def _part(self) -> Tensor:
        """What this rank stores: [quantization.size_of_part]."""
        return self.memory()[: self.quantization.size_of_part]


class QuantizedFlatShard(QuantizedShard, FlatShard):
    """ZeRO-3: rank r of n has ceil(groups / n) groups, from r * ceil(groups / n) on."""

    @staticmethod
    def _layout(parameter: Any) -> tuple[int, tuple[int, ...]]:
        quantization: Quantization = parameter.quantization
        return quantization.groups_of_part * GROUP, quantization.shape


class QuantizedRectangleShard(QuantizedShard, RectangleShard):
    """Tensor parallelism: whole groups of a rectangle of the matrix."""
