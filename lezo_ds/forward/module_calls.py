"""How one module computes its output with perturbed copies of its parameters.

    linear modules            a product for each probe, written next to each other in one output
    all others                a call for each probe, with the copies in the place of the parameters

Matrices are perturbed in the dtype of the model, vectors in float32 (`dtype_of_copies`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.pytorch_utils import Conv1D

from lezo_ds.forward.copies import Args, Forward, Kwargs
from lezo_ds.forward.probes import PerturbedWeights
from lezo_ds.sharding.tensor_parallel import (
    LINEAR_FORWARDS,
    LOOKUP_FORWARDS,
    sum_outputs,
    sums_outputs,
)

PRODUCTS = (nn.Linear.forward, Conv1D.forward, *LINEAR_FORWARDS)
"""Forward methods of modules that multiply their input by one matrix, and may add a bias."""


def dtype_of_copies(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's perturbed copies: float32 for vectors, else its own.

    Around 1.0, a 16-bit LayerNorm weight is too coarse to hold theta + mu z.
    """
    return torch.float32 if parameter.dim() == 1 else parameter.dtype


def is_16_bit_norm(module: nn.Module) -> bool:
    """Return whether a module of 16 bits holds nothing but vectors. It runs in float32 then."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    has_children = next(module.children(), None) is not None
    if has_children or own[0].dtype == torch.float32:
        return False
    return all(parameter.dim() == 1 for parameter in own)


def children_read_by(module: nn.Module) -> list[str]:
    """Return the names of the children whose weights the forward method of a module reads itself.

    A convolution before a recurrence is one: its own forward method never runs. transformers (5.23)
    marks such a module with the decorator `force_accelerate_hooks`, whose closure has the names.
    """
    function: Any = type(module).forward
    while inspect.isfunction(function):
        names = inspect.getclosurevars(function).nonlocals.get("child_module_names")
        if names is not None:
            return list(names)
        function = getattr(function, "__wrapped__", None)
    return []


def call_with_weights(
    module: nn.Module,
    own_forward: Forward,
    perturbed: Mapping[str, Tensor],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Call a module's forward with the perturbed weights of one probe, by the parameters' names.

    A 16-bit norm gets float32 parameters, any other module its own dtype. The name of a child's
    parameter is that in the module, such as "conv1d.weight".
    """
    is_norm = is_16_bit_norm(module)
    names = set(perturbed)
    if is_norm:
        names |= {name for name, parameter in module._parameters.items() if parameter is not None}
    replaced = []
    try:
        for name in names:
            path, _, key = name.rpartition(".")
            # nn.Module.__setattr__ refuses plain tensors where parameters are registered.
            table: dict[str, Any] = module.get_submodule(path)._parameters
            own = table[key]
            replaced.append((table, key, own))
            dtype = torch.float32 if is_norm else own.dtype
            table[key] = perturbed.get(name, own).to(dtype)
        return own_forward(*args, **kwargs)
    finally:
        for table, key, own in replaced:
            table[key] = own


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Return a value with all floating-point tensors in it cast."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tree_map(cast, values)


def is_product(own_forward: Forward, args: Args, kwargs: Kwargs, rows: int) -> bool:
    """Return whether `product_at_probes` can run this call of a module.

    The first dimension of the batch must be a multiple of `rows`, the number of rows of all copies.
    """
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        return False
    (batch,) = args
    # For inputs of more dimensions, torch may choose another kernel than that of a product of two
    # matrices, with other bits.
    has_rows = batch.dim() in (2, 3) and batch.shape[0] % rows == 0
    function = getattr(own_forward, "__func__", None)
    return has_rows and batch.is_contiguous() and function in PRODUCTS


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
    weights = perturbed.get("weight") or [stored] * num_probes
    if not isinstance(module, Conv1D):  # whose weight is stored as [inputs, outputs]
        weights = [weight.t() for weight in weights]
    bias = module._parameters.get("bias")
    biases: Sequence[Tensor] = ()
    if bias is not None:
        biases = perturbed.get("bias") or [bias] * num_probes

    num_outputs = weights[0].shape[1]
    is_term_of_sum = sums_outputs(module)
    in_product = biases
    added_later: Sequence[Tensor] = ()
    if is_term_of_sum:
        in_product = ()
        added_later = biases
    elif "bias" in perturbed and stored.dtype != torch.float32:
        # A product without a bias may be another kernel, with other bits.
        in_product = [_zero_bias(num_outputs, stored.dtype, batch.device)] * num_probes
        added_later = biases

    output = batch.new_empty(*batch.shape[:-1], num_outputs)
    outputs = output.view(num_probes, -1, num_outputs)
    inputs = batch.view(num_probes, -1, batch.shape[-1])
    for probe, weight in enumerate(weights):
        if in_product:
            torch.addmm(in_product[probe], inputs[probe], weight, out=outputs[probe])
        else:
            torch.mm(inputs[probe], weight, out=outputs[probe])
    if is_term_of_sum:
        sum_outputs(module, output)
    if added_later:
        outputs += torch.stack(list(added_later))[:, None]  # rounded once, to the output's dtype
    return output


def add_before_sum(
    module: nn.Module,
    own_forward: Forward,
    inputs: Tensor,
    add: Callable[[Tensor], None],
) -> Tensor:
    """Run a linear module, and add something to its output in place.

    If the product of a rank is a term of a sum over ranks, `add` changes the term.
    """
    if not sums_outputs(module):
        output: Tensor = own_forward(inputs)
        add(output)
        return output
    weight = module._parameters["weight"]
    assert weight is not None, "a linear module has a weight"
    output = inputs @ weight.t()
    add(output)
    sum_outputs(module, output)
    bias = module._parameters.get("bias")
    if bias is not None:
        output += bias
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
