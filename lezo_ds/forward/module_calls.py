"""How one module computes its output with perturbed copies of its parameters.

    linear modules            a product for each probe, written next to each other in one output
    LayerNorms of 16 bits     on a GPU, one kernel for all probes (norm_kernel.py)
    all others                a call for each probe, with the copies in the place of the parameters

Matrices are perturbed in the dtype of the model, vectors in float32 (`dtype_of_copies`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.pytorch_utils import Conv1D

from lezo_ds.forward.probes import PerturbedWeights
from lezo_ds.noise import stacked
from lezo_ds.sharding.tensor_parallel import (
    LINEAR_FORWARDS,
    LOOKUP_FORWARDS,
    sum_outputs,
    sums_outputs,
)

RunAtProbes = Callable[[nn.Module, PerturbedWeights, Tensor, int], Tensor]
"""(module, weights of k probes, batch [k * n, ...], k) -> output [k * n, ...]."""

_PRODUCTS = (nn.Linear.forward, Conv1D.forward, *LINEAR_FORWARDS)

NORM_VERSION = 1
"""Version of the arithmetic of perturbed 16-bit norms on GPUs. Journals record it."""


def norm_arithmetic(device: torch.device) -> dict[str, str]:
    """Return what decides the last bits of a perturbed norm, besides versions of libraries."""
    if device.type != "cuda":
        return {}
    return {"16-bit perturbed LayerNorm": f"version {NORM_VERSION}"}


def dtype_of_copies(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's perturbed copies: float32 for vectors, else its own.

    Around 1.0, a 16-bit LayerNorm weight is too coarse to hold theta + mu z.
    """
    return torch.float32 if parameter.dim() == 1 else parameter.dtype


def is_16_bit_norm(module: nn.Module) -> bool:
    """Return whether a module of 16 bits holds nothing but vectors. It runs in float32 then."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if own[0].dtype == torch.float32:
        return False
    has_children = next(module.children(), None) is not None
    return not has_children and all(parameter.dim() == 1 for parameter in own)


def call_with_weights(
    module: nn.Module,
    own_forward: Callable[..., Any],
    perturbed: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a module's forward with the perturbed weights of one probe, by the parameters' names.

    A 16-bit norm gets float32 parameters, any other module its own dtype.
    """
    own = {name: p for name, p in module._parameters.items() if p is not None}
    if is_16_bit_norm(module):
        used = {
            name: perturbed[name] if name in perturbed else p.float() for name, p in own.items()
        }
    else:
        used = {name: weight.to(own[name].dtype) for name, weight in perturbed.items()}
    try:
        # nn.Module.__setattr__ refuses plain tensors where parameters are registered.
        module._parameters.update(used)  # type: ignore[arg-type]
        return own_forward(*args, **kwargs)
    finally:
        module._parameters.update(own)


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Return a value with all floating-point tensors in it cast."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tree_map(cast, values)


def runner_at_probes(
    module: nn.Module,
    own_forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows: int,
) -> RunAtProbes | None:
    """Return the function that runs this call for all probes at once, or None if there is none.

    The first dimension of the batch must be a multiple of `rows`, the number of rows of all copies.
    """
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        return None
    (batch,) = args
    if not batch.is_contiguous() or batch.dim() < 2 or batch.shape[0] % rows:
        return None
    function = getattr(own_forward, "__func__", None)
    # For inputs of more dimensions, torch may choose another kernel than that of a product of two
    # matrices, with other bits.
    if function in _PRODUCTS and batch.dim() <= 3:
        return product_at_probes
    if function is nn.LayerNorm.forward and is_on_gpu(batch) and is_16_bit_norm(module):
        from lezo_ds.forward.norm_kernel import norm_at_probes  # CPUs often do not have Triton

        return norm_at_probes if batch.dtype == module.weight.dtype else None
    return None


def is_on_gpu(batch: Tensor) -> bool:
    """Return whether a batch is on a GPU. Tests of Triton's interpreter replace this function."""
    return batch.is_cuda


def product_at_probes(
    module: nn.Module, perturbed: PerturbedWeights, batch: Tensor, num_probes: int
) -> Tensor:
    """Run a linear module: one matrix product for each probe, in the output of all.

    Args:
        module: nn.Linear, Conv1D, or a linear layer of DeepSpeed's AutoTP.
        perturbed: copies of its weight, of its bias, or of both.
        batch: contiguous [k * n, inputs] or [k * n, tokens, inputs].
        num_probes: k.

    Returns:
        [k * n, outputs] or [k * n, tokens, outputs], in the dtype of the batch.

    The bias is added in one of three places, because each rounds differently:

        by the product         the bias has the dtype of the product (cuBLAS takes no other)
        after the product      a perturbed bias of a 16-bit model: it has float32
        after the sum of ranks products that are terms of a sum over tensor-parallel ranks
    """
    stored = module._parameters["weight"]
    assert stored is not None, "a linear module has a weight"
    bias = module._parameters.get("bias")
    weights: Sequence[Tensor] = perturbed.get("weight") or [stored] * num_probes
    if not isinstance(module, Conv1D):  # whose weight is stored as [inputs, outputs]
        weights = [weight.t() for weight in weights]
    biases: Sequence[Tensor] = ()
    if bias is not None:
        biases = perturbed.get("bias", [bias] * num_probes)
    is_term_of_sum = sums_outputs(module)
    is_bias_float32 = "bias" in perturbed and stored.dtype != torch.float32
    adds_later = len(biases) > 0 and (is_term_of_sum or is_bias_float32)

    num_outputs = weights[0].shape[1]
    output = batch.new_empty(*batch.shape[:-1], num_outputs)
    inputs_of_probes = batch.view(num_probes, -1, batch.shape[-1])
    outputs_of_probes = output.view(num_probes, -1, num_outputs)
    added = biases
    if is_term_of_sum:
        added = ()
    elif is_bias_float32:
        # A product without a bias may be another kernel, with other bits.
        added = [_zero_bias(num_outputs, stored.dtype, batch.device)] * num_probes
    for probe, weight in enumerate(weights):
        inputs = inputs_of_probes[probe]
        if added:
            torch.addmm(added[probe], inputs, weight, out=outputs_of_probes[probe])
        else:
            torch.mm(inputs, weight, out=outputs_of_probes[probe])
    if is_term_of_sum:
        sum_outputs(module, output)
    if adds_later:
        # A sum of 16 and 32 bits is rounded once, to 16.
        outputs_of_probes.add_(stacked(biases)[:, None])
    return output


@functools.lru_cache(maxsize=16)
def _zero_bias(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=device)


def modules_that_run(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those in it that run whenever it does, and that need whole weights."""
    # Of a list of experts, some may not run. Of an embedding, only a few rows are read.
    if isinstance(module, nn.ModuleList) or type(module).forward in LOOKUP_FORWARDS:
        return
    yield module
    for child in module.children():
        yield from modules_that_run(child)
