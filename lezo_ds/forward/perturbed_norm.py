"""Runs a 16-bit LayerNorm at all probes with one kernel, on GPUs.

Perturbed norms compute in float32 (see `replaced_call.copy_dtype`), and torch 2.13 has no LayerNorm for
16-bit inputs and float32 weights on GPUs. With two probes, its operators are five kernels: a cast of the
inputs, a norm for each probe, and a copy of each result. This kernel sums in another order than torch's, so
its last bits differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lezo_ds.noise import stacked
from lezo_ds.noise.launch import Launch

NORM_VERSION = 1
"""Of the arithmetic on GPUs. Journals record it."""

_ELEMENTS_PER_WARP = 512
_MOST_WARPS = 8


def norm_facts(device: torch.device) -> dict[str, str]:
    """Return, by name, what decides the last bits of a perturbed norm besides versions of libraries."""
    return {"16-bit perturbed LayerNorm": f"version {NORM_VERSION}"} if device.type == "cuda" else {}


def is_fused(
    module: nn.Module, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], rows: int
) -> bool:
    """Return whether `norm_at_probes` serves a call of a module.

    Args:
        module: some of its parameters are perturbed.
        original: its forward.
        args: of the forward.
        kwargs: of the forward.
        rows: number of rows of all copies of the batch. 1 allows any number.
    """
    if getattr(original, "__func__", None) is not nn.LayerNorm.forward or kwargs or len(args) != 1:
        return False
    (batch,) = args
    weight = module._parameters["weight"]
    assert weight is not None, "a LayerNorm with parameters has a weight"
    if not (isinstance(batch, Tensor) and is_on_gpu(batch) and batch.is_contiguous()):
        return False
    has_16_bits = batch.dtype == weight.dtype != torch.float32
    return has_16_bits and weight.dim() == 1 and batch.dim() > 1 and batch.shape[0] % rows == 0


def is_on_gpu(batch: Tensor) -> bool:
    """Return whether Triton's kernels can run on a tensor."""
    return batch.is_cuda


def norm_at_probes(
    module: nn.Module, copies: Mapping[str, Sequence[Tensor]], batch: Tensor, num_copies: int
) -> Tensor:
    """Return the output of a 16-bit `nn.LayerNorm` at several probes, on a GPU.

    Args:
        module: holds the parameters that are not perturbed.
        copies: float32, one of each probe, by the name of the parameter.
        batch: [num_copies * n, ..., width], contiguous, of 16 bits.
        num_copies: number of probes.

    Returns:
        A tensor like `batch`.
    """
    output, width = torch.empty_like(batch), batch.shape[-1]
    num_rows = batch.numel() // width
    weight, weight_distance = _of_all_probes(module, copies, "weight")
    bias, bias_distance = _of_all_probes(module, copies, "bias")
    tensors = (output, batch, weight, bias)
    launch = _launch(num_rows, width, tuple(map(_seen_by_triton, tensors)), batch.device)
    rows_of_copy = num_rows // num_copies
    launch.run(*tensors, rows_of_copy, weight_distance, bias_distance, module.eps)
    return output


def _of_all_probes(
    module: nn.Module, copies: Mapping[str, Sequence[Tensor]], name: str
) -> tuple[Tensor | None, int]:
    """Return a vector at all probes, and the distance between two probes in elements."""
    if name in copies:
        vectors = stacked(copies[name])
        return vectors, vectors.stride(0)
    return module._parameters[name], 0


def _seen_by_triton(tensor: Tensor | None) -> tuple[torch.dtype, bool] | None:
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0)


@functools.lru_cache(maxsize=1024)
def _launch(num_rows: int, width: int, _seen: object, _device: torch.device) -> Launch:
    """Return a launch for rows of a width. Launches differ if Triton sees something else in the tensors."""
    # CPUs do not need Triton and often do not have it.
    from lezo_ds.forward.norm_kernel import layer_norm_kernel

    width_power = 1 << (width - 1).bit_length()
    num_warps = min(max(width_power // _ELEMENTS_PER_WARP, 1), _MOST_WARPS)
    return Launch(layer_norm_kernel, num_rows, {"width": width, "width_power": width_power}, num_warps)
