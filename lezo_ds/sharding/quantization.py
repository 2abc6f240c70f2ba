"""Matrices in 4 or 8 bits: what is stored, and the modules that compute with it.

Elements are counted in row-major order, in groups of 64. A group has a minimum and a step in the
dtype of the model, and a code of 4 or 8 bits for each element (DeepSpeed's ZeRO-Inference and bits
and bytes call this asymmetric):

    element = code * step + minimum          step = (maximum - minimum) / (2**bits - 1)

The numbers of a rank lie one after the other, and are seen as elements of the model's dtype, so
that ZeRO-3 shards and gathers them as it does any parameter. For g groups of bf16 and 4 bits:

    [ codes: 16 g elements | steps: g | minima: g ]     18 g instead of 64 g elements

    bytes of codes       element 0, 1 | 2, 3 | ...      the first in the high half

Codes of 8 bits may be trained: an update moves them on the grid of their group, whose minimum and
step stay (`noise.Kernels.update`). Codes of 4 bits are frozen.

A group never belongs to two ranks. While a module runs, its matrix is there in the dtype of the
model. So the adapter and all else compute with the same values on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lezo_ds.sharding.parameters import own_name

GROUP = 64
"""Number of elements that have a minimum and a step in common."""

TRAINED_BITS = 8
"""Bits of the codes that may be trained. Of 4 bits, a step is so long that a run diverges."""

_CHUNK_ON_CPU = 1 << 11  # groups whose float32 values stay in a processor's cache
_CHUNK = 1 << 16  # an operation on a GPU has a fixed cost


@dataclass(frozen=True)
class Quantization:
    """How a matrix is stored.

    Attributes:
        bits: of a code, 4 or 8.
        dtype: of the matrix while a module computes with it.
        shape: of the matrix that modules compute with.
        num_parts: number of ranks that have a part of it each.
    """

    bits: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_parts: int

    @property
    def numel(self) -> int:
        """Number of elements of the matrix."""
        return math.prod(self.shape)

    @property
    def groups_of_part(self) -> int:
        """Number of groups that a rank has. Those past the end of the matrix are never read."""
        return -(-self.numel // (GROUP * self.num_parts))

    @property
    def size_of_part(self) -> int:
        """Number of elements of `dtype` that a rank stores."""
        return self.groups_of_part * (self._codes_of_group + 2)

    @property
    def _codes_of_group(self) -> int:
        """Number of elements of `dtype` that the codes of a group take."""
        return GROUP * self.bits // 8 // self.dtype.itemsize

    def quantize_(self, part: Tensor, values: Tensor) -> None:
        """Store the elements of one part.

        Args:
            part: [size_of_part], what a rank stores.
            values: [n], of any dtype, a multiple of 64 elements. They may be on another device.
        """
        most = 2**self.bits - 1
        groups = values.reshape(-1, GROUP)
        num_groups = len(groups)
        stored = [field[:num_groups] for field in self._fields(part)]
        for codes, steps, minima, given in _chunks(*stored, groups):
            group = given.to(part.device, torch.float32)
            low = group.amin(1, keepdim=True)
            high = group.amax(1, keepdim=True)
            minima.copy_(low)
            steps.copy_((high - low) / most)
            # Codes belong to the rounded minimum and step. The step of equal elements is 0.
            step = torch.where(steps == 0, 1.0, steps.float())
            place = (group - minima.float()) / step
            code = place.round_().clamp_(0, most).to(torch.uint8)
            if self.bits == 4:
                first = code[:, 0::2]
                second = code[:, 1::2]
                code = first << 4 | second
            codes.copy_(code)

    def codes_and_grid(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of a part's codes of 8 bits [g * 64], and of its steps and minima [2, g]."""
        codes, _, _ = self._fields(part)
        first_of_grid = self.groups_of_part * self._codes_of_group
        grid = part[first_of_grid:]
        return codes.view(-1), grid.view(2, -1)

    def dequantize(self, parts: Tensor) -> Tensor:
        """Return the elements of one part or of several: [number of groups * 64].

        Args:
            parts: [k * size_of_part], what k ranks store.
        """
        by_part = parts.view(-1, self.size_of_part)
        values = parts.new_empty(len(by_part), self.groups_of_part, GROUP)
        for part, elements in zip(by_part, values, strict=True):
            for codes, steps, minima, group in _chunks(*self._fields(part), elements):
                value = codes
                if self.bits == 4:
                    halves = torch.stack([codes >> 4, codes & 15], dim=-1)
                    value = halves.view(-1, GROUP)
                # Two operations, which round twice on any device.
                scaled = value.float().mul_(steps.float())
                group.copy_(scaled.add_(minima.float()))
        return values.view(-1)

    def matrix(self, parts: Tensor) -> Tensor:
        """Return the matrix [*shape] that modules compute with, from the parts of all ranks."""
        return self.dequantize(parts)[: self.numel].view(self.shape)

    def _fields(self, part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the bytes of a part's codes [g, bytes], its steps [g, 1] and minima [g, 1]."""
        num_groups = self.groups_of_part
        sizes = [num_groups * self._codes_of_group, num_groups, num_groups]
        codes, steps, minima = torch.split(part, sizes)
        bytes_of_codes = codes.view(torch.uint8)
        return bytes_of_codes.view(num_groups, -1), steps[:, None], minima[:, None]


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of each tensor, some groups at a time."""
    size = _CHUNK_ON_CPU if tensors[0].device.type == "cpu" else _CHUNK
    parts = [torch.split(tensor, size) for tensor in tensors]
    return zip(*parts, strict=True)


def quantization_of(parameter: nn.Parameter) -> Quantization | None:
    """Return how a parameter is quantized, or None if it is stored as it is."""
    return getattr(parameter, "quantization", None)


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the values that modules compute with, wherever they are."""
    quantization = quantization_of(parameter)
    if quantization is not None:
        return quantization.shape
    # A parameter that ZeRO-3 has sharded is empty. DeepSpeed keeps its full shape in ds_shape.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def num_trained_codes(model: nn.Module) -> int:
    """Return how many codes updates move."""
    number = 0
    for parameter in model.parameters():
        quantization = quantization_of(parameter)
        if quantization is not None and parameter.requires_grad:
            number += quantization.numel
    return number


def values_of(parameter: nn.Parameter) -> Tensor:
    """Return the values of a gathered parameter, of which no module runs: dequantized if it is."""
    quantization = quantization_of(parameter)
    if quantization is None:
        return parameter.data
    return quantization.matrix(parameter.data)


def quantize_parameters(
    model: nn.Module,
    names: Set[str],
    bits: int,
    num_parts: int,
) -> None:
    """Turn matrices on the meta device into quantized ones, and let their modules dequantize them.

    Args:
        model: on the meta device.
        names: own names of the matrices, each the `weight` of a module.
        bits: of a code.
        num_parts: number of ranks that get a part of each matrix; 1 if tensor parallelism has
            split them.
    """
    matrices: dict[str, Any] = dict(model.named_parameters())
    for name, matrix in matrices.items():
        if own_name(name) not in names:
            continue
        shape = tuple(matrix.shape)
        quantization = Quantization(bits, matrix.dtype, shape, num_parts)
        size = quantization.num_parts * quantization.size_of_part
        matrix.data = matrix.new_empty(size)
        if bits != TRAINED_BITS:
            matrix.requires_grad_(False)
        matrix.quantization = quantization
        _dequantize_in_calls(model.get_submodule(name.removesuffix(".weight")))


def _dequantize_in_calls(module: nn.Module) -> None:
    """Let a module compute with its matrix, which is freed when the module has run.

    Hooks, because a wrapper of `forward` may run it several times in a call.
    """
    stored: list[Tensor] = []

    def dequantize(*_: object) -> None:
        weight: Any = module._parameters["weight"]
        stored.append(weight.data)
        weight.data = values_of(weight)  # a perturbed copy in its place is what it is

    def restore(*_: object) -> None:
        weight: Any = module._parameters["weight"]
        weight.data = stored.pop()

    module.register_forward_pre_hook(dequantize)
    module.register_forward_hook(restore, always_call=True)  # also after an error
