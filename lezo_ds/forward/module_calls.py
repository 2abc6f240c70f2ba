"""How a module runs with perturbed copies of its parameters, one copy for each probe.

Linear modules and, on GPUs, LayerNorms of 16 bits run all probes at once and write their outputs next to each
other. Any other module is called once for each probe.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.pytorch_utils import Conv1D

from lezo_ds.noise import stacked
from lezo_ds.sharding.tensor_parallel import (
    LINEAR_FORWARDS,
    LOOKUP_FORWARDS,
    sum_outputs,
    sums_outputs,
)

Copies = Mapping[str, Sequence[Tensor]]
"""The perturbed copies of a module's parameters, one for each probe, by the parameter's name."""

RunAtProbes = Callable[[nn.Module, Copies, Tensor, int], Tensor]
"""(module, copies, batch, number of probes k) -> output. The first dimension of batch and output is k * n."""

_PRODUCTS = (nn.Linear.forward, Conv1D.forward, *LINEAR_FORWARDS)

NORM_VERSION = 1
"""Of the arithmetic of perturbed 16-bit norms on GPUs. Journals record it."""


def norm_facts(device: torch.device) -> dict[str, str]:
    """Return, by name, what decides the last bits of a perturbed norm besides versions of libraries."""
    return (
        {"16-bit perturbed LayerNorm": f"version {NORM_VERSION}"} if device.type == "cuda" else {}
    )


def copy_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's perturbed copies: float32 for vectors, else the parameter's own.

    Around 1.0 a 16-bit LayerNorm weight is too coarse to hold theta + mu z.
    """
    return torch.float32 if parameter.dim() == 1 else parameter.dtype


def is_16_bit_norm(module: nn.Module) -> bool:
    """Return whether a module of 16 bits holds nothing but vectors. It runs in float32 then."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if own[0].dtype == torch.float32 or next(module.children(), None) is not None:
        return False
    return all(parameter.dim() == 1 for parameter in own)


def call_with_copies(
    module: nn.Module,
    original: Callable[..., Any],
    copies: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a module's forward with the copies of one probe: in float32 for a norm, else in its own dtype."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    if is_16_bit_norm(module):
        used = {name: copies[name] if name in copies else p.float() for name, p in own.items()}
    else:
        used = {name: copy.to(own[name].dtype) for name, copy in copies.items()}
    try:
        # nn.Module.__setattr__ refuses plain tensors where parameters are registered.
        module._parameters.update(used)  # type: ignore[arg-type]
        return original(*args, **kwargs)
    finally:
        module._parameters.update(own)


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Return a value with all floating-point tensors in it cast."""
    return tree_map(
        lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, values
    )


def runner_at_probes(
    module: nn.Module,
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: int,
) -> RunAtProbes | None:
    """Return the function that runs this call of a forward for all probes at once; None if there is none.

    The batch must have a multiple of `rows`, those of all its copies.
    """
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        return None
    (batch,) = args
    if not batch.is_contiguous() or batch.dim() < 2 or batch.shape[0] % rows:
        return None
    function = getattr(original, "__func__", None)
    # For inputs of more dimensions, torch may choose another kernel than that of a product of two matrices.
    if function in _PRODUCTS and batch.dim() <= 3:
        return product_at_probes
    if function is nn.LayerNorm.forward and is_on_gpu(batch) and is_16_bit_norm(module):
        from lezo_ds.forward.norm_kernel import norm_at_probes  # CPUs often do not have Triton

        return norm_at_probes if batch.dtype == module.weight.dtype else None
    return None


def is_on_gpu(batch: Tensor) -> bool:
    return batch.is_cuda


def product_at_probes(module: nn.Module, copies: Copies, batch: Tensor, num_copies: int) -> Tensor:
    """Run a linear module: a matrix product for each probe, and one addition of all 16-bit biases.

    A perturbed bias of a 16-bit model is added in float32. The product cannot do that, because cuBLAS adds
    biases of the output's dtype only. Products that are terms of a sum over ranks get the bias after it.
    """
    stored, bias = module._parameters["weight"], module._parameters.get("bias")
    assert stored is not None, "a linear module has a weight"
    weights: Sequence[Tensor] = copies.get("weight") or [stored] * num_copies
    if not isinstance(module, Conv1D):
        weights = [weight.t() for weight in weights]
    num_outputs = weights[0].shape[1]
    output = batch.new_empty(*batch.shape[:-1], num_outputs)
    batches = batch.view(num_copies, -1, batch.shape[-1])
    outputs = output.view(num_copies, -1, num_outputs)
    added: Sequence[Tensor] | None = (
        None if bias is None else copies.get("bias", [bias] * num_copies)
    )
    biases, is_summed = added, sums_outputs(module)
    is_added_later = "bias" in copies and stored.dtype != torch.float32
    if is_summed:
        added, is_added_later = None, bias is not None
    elif is_added_later:
        added = [_zero_bias(num_outputs, stored.dtype, batch.device)] * num_copies
    for probe, weight in enumerate(weights):
        if added is None:
            torch.mm(batches[probe], weight, out=outputs[probe])
        else:
            torch.addmm(added[probe], batches[probe], weight, out=outputs[probe])
    if is_summed:
        sum_outputs(module, output)
    if is_added_later:
        assert biases is not None
        outputs.add_(stacked(biases)[:, None])  # a sum of 16 and 32 bits is rounded once, to 16
    return output


@functools.lru_cache(maxsize=16)
def _zero_bias(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A product without a bias may be another kernel, with other bits.
    return torch.zeros(size, dtype=dtype, device=device)


def modules_that_run(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those in it that run whenever it does, and that need whole weights."""
    # Of a list of experts, some may not run. Of an embedding, a few rows are read.
    if isinstance(module, nn.ModuleList) or type(module).forward in LOOKUP_FORWARDS:
        return
    yield module
    for child in module.children():
        yield from modules_that_run(child)
