"""Shards of quantized matrices: they store codes, and are read as the values that modules use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from lezo_ds.sharding.quantization import GROUP, Quantization
from lezo_ds.sharding.shards import FlatShard, RectangleShard, Shard, open_slice


class QuantizedShard(Shard):
    """Stores the codes of some elements. They are never updated."""

    @property
    def quantization(self) -> Quantization:
        """How the elements are stored."""
        quantization: Quantization = self.parameter.quantization
        return quantization

    @abstractmethod
    def _open_codes(self, *, write: bool = False) -> AbstractContextManager[Tensor]:
        """Open what this rank stores: [quantization.size_of_part]."""

    def open(self, *, write: bool = False) -> AbstractContextManager[Tensor]:
        """Open a copy of the elements, in the dtype that modules compute with."""
        assert not write, f"{self.name} is quantized"
        return self._dequantized()

    @contextmanager
    def _dequantized(self) -> Iterator[Tensor]:
        with self._open_codes() as part:
            yield self.quantization.dequantize(part)[: self.count]

    def fill(self, values: Tensor) -> None:
        """Quantize values [count] of any dtype, and store their codes."""
        if self.count:
            with self._open_codes(write=True) as part:
                self.quantization.quantize_(part, values)


class QuantizedFlatShard(QuantizedShard, FlatShard):
    """ZeRO-3: rank r of n has ceil(groups / n) groups, from r * ceil(groups / n) on."""

    @staticmethod
    def _layout(parameter: Any) -> tuple[int, tuple[int, ...]]:
        quantization: Quantization = parameter.quantization
        return quantization.groups_of_part * GROUP, quantization.shape

    def _open_codes(self, *, write: bool = False) -> AbstractContextManager[Tensor]:
        return open_slice(self.parameter, self.quantization.size_of_part, write=write)


class QuantizedRectangleShard(QuantizedShard, RectangleShard):
    """Tensor parallelism: whole groups of a rectangle of the matrix."""

    @staticmethod
    def _count(parameter: Any) -> int:
        quantization: Quantization = parameter.quantization
        return quantization.numel

    def _open_codes(self, *, write: bool = False) -> AbstractContextManager[Tensor]:
        return nullcontext(self.parameter.data)
