"""A 16-bit LayerNorm at several probes of its weights as one Triton kernel.

Torch 2.13 has no LayerNorm for 16-bit inputs and float32 weights on GPUs: with two probes, its
operators are five kernels. This kernel sums in another order than torch's, so its last bits differ.
"""

# mypy: disallow-untyped-decorators=False, warn-return-any=False
# ruff: noqa: PLR0913 (a kernel has no objects to bundle its arguments in)

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from lezo_ds.forward.probes import PerturbedWeights
from lezo_ds.noise import stacked
from lezo_ds.noise.gpu import Launch
from lezo_ds.noise.triton_kernels import round_nearest

_ELEMENTS_PER_WARP = 512
_MOST_WARPS = 8


@triton.jit(do_not_specialize=["rows_of_copy", "weight_distance", "bias_distance"])
def layer_norm_kernel(
    out_ptr: tl.tensor,
    in_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    rows_of_copy: tl.int32,
    weight_distance: tl.int64,
    bias_distance: tl.int64,
    eps: tl.float32,
    width: tl.constexpr,
    width_power: tl.constexpr,
) -> None:
    """out[r] = (in[r] - mean) / sqrt(variance + eps) * weight + bias, one row r a program.

    A row has `width` elements. Row r is of probe r // rows_of_copy. Its weight and bias lie that
    many times their distance, in elements, after those of the first probe. `bias_ptr` may be None.
    `width_power` is the least power of two that is at least `width`. All is computed in fp32 and
    rounded once.
    """
    row = tl.program_id(0).to(tl.int64)
    probe = row // rows_of_copy
    column = tl.arange(0, width_power)
    inside = column < width
    value = tl.load(in_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    # The operator / is not rounded correctly on GPUs.
    num_columns = tl.full([], width, tl.float32)
    centered = tl.where(inside, value - tl.div_rn(tl.sum(value, axis=0), num_columns), 0.0)
    variance = tl.div_rn(tl.sum(centered * centered, axis=0), num_columns)
    normed = centered * tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    weight = tl.load(weight_ptr + probe * weight_distance + column, mask=inside).to(tl.float32)
    result = normed * weight
    if bias_ptr is not None:
        result += tl.load(bias_ptr + probe * bias_distance + column, mask=inside).to(tl.float32)
    result = round_nearest(result, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column, result, mask=inside)


def norm_at_probes(
    module: nn.Module, perturbed: PerturbedWeights, batch: Tensor, num_probes: int
) -> Tensor:
    """Run `nn.LayerNorm` at all probes by one launch.

    Args:
        module: of 16 bits.
        perturbed: float32 copies of its weight, of its bias, or of both.
        batch: contiguous, 16 bits, [num_probes * rows, tokens, width].
        num_probes: each has as many rows.

    Returns:
        The shape and dtype of the batch.
    """
    output = torch.empty_like(batch)
    width = batch.shape[-1]
    num_rows = batch.numel() // width
    weight, weight_distance = _at_all_probes(module, perturbed, "weight")
    bias, bias_distance = _at_all_probes(module, perturbed, "bias")
    tensors = (output, batch, weight, bias)
    # Triton compiles another kernel for another dtype, and for an address that is no multiple of
    # 16.
    specialized_by = tuple(
        None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0)
        for tensor in tensors
    )
    launch = _launch(num_rows, width, specialized_by, batch.device)
    launch.run(*tensors, num_rows // num_probes, weight_distance, bias_distance, module.eps)
    return output


def _at_all_probes(
    module: nn.Module, perturbed: PerturbedWeights, name: str
) -> tuple[Tensor | None, int]:
    """Return a vector at all probes, and the distance of two probes in elements (0: shared)."""
    if name in perturbed:
        vectors = stacked(perturbed[name])
        return vectors, vectors.stride(0)
    return module._parameters[name], 0


# The key has all that Triton specializes a kernel by, so that a launch is never used for another
# one.
@functools.lru_cache(maxsize=1024)
def _launch(num_rows: int, width: int, _specialized_by: object, _device: torch.device) -> Launch:
    width_power = 1 << (width - 1).bit_length()
    num_warps = min(max(width_power // _ELEMENTS_PER_WARP, 1), _MOST_WARPS)
    constants = {"width": width, "width_power": width_power}
    return Launch(layer_norm_kernel, num_rows, constants, num_warps)
