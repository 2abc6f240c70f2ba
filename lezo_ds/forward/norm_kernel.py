"""LayerNorm at several probes of its weights as one Triton kernel."""

# mypy: disallow-untyped-decorators=False, warn-return-any=False
# ruff: noqa: PLR0913 (a kernel has no objects to bundle its arguments in)

from __future__ import annotations

import triton
import triton.language as tl

from lezo_ds.noise.triton_kernels import round_nearest


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
    """out[r] = (in[r] - mean) / sqrt(variance + eps) * weight + bias for a row r of `width` in each program.

    Row r is of probe r // rows_of_copy. Its weight and bias lie that many times their distance, in elements,
    after those of the first probe. `bias_ptr` may be None. `width_power` is the least power of two that is
    at least `width`. All is computed in fp32 and rounded once.
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
