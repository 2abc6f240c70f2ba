"""Calls a module with perturbed copies instead of its own parameters, in the right precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.pytorch_utils import Conv1D

BIAS_LAST = (nn.Linear.forward, Conv1D.forward)
"""The forwards known to be matrix product + bias, so that the bias can be added after them."""


def copy_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's perturbed copies: float32 for vectors, else the parameter's own.

    Around 1.0 a 16-bit LayerNorm weight is too coarse to hold theta + mu z.
    """
    return torch.float32 if parameter.dim() == 1 else parameter.dtype


def runs_in_float32(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether a 16-bit module holds nothing but vectors (a norm), so that it runs in float32.

    Args:
        module: holds `parameter`.
        parameter: one that is perturbed.
    """
    if parameter.dtype == torch.float32 or next(module.children(), None) is not None:
        return False
    return all(parameter.dim() == 1 for parameter in module.parameters(recurse=False))


def call_with_copies(
    module: nn.Module,
    original: Callable[..., Any],
    copies: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:  # noqa: ANN401
    """Call a module with perturbed copies instead of its parameters.

    Copies of one dimension are float32. In 16-bit models a module that holds nothing else then runs in
    float32 (see `runs_in_float32`), and the bias of a linear module is added in float32. In any other 16-bit
    module they are cast to 16 bits, because it is not known what the module does with them.

    Args:
        module: whose parameters are replaced.
        original: its forward.
        copies: by the name of the module's parameter.
        args: of the forward; float32 for a module that runs in float32, whose output then is float32.
        kwargs: of the forward; likewise.
    """
    parameter = module._parameters[next(iter(copies))]
    assert parameter is not None, "copies are those of parameters"
    dtype = parameter.dtype
    if dtype == torch.float32:
        return _call_replaced(module, original, copies, args, kwargs)
    if runs_in_float32(module, parameter):
        others = {
            name: p.float() for name, p in module._parameters.items() if p is not None and name not in copies
        }
        return _call_replaced(module, original, others | dict(copies), args, kwargs)
    if type(module).forward in BIAS_LAST and "bias" in copies:
        without_bias = {**copies, "bias": zero_bias(len(copies["bias"]), dtype, copies["bias"].device)}
        output = _call_replaced(module, original, without_bias, args, kwargs)
        return (output + copies["bias"]).to(dtype)  # the sum of a 16-bit and a float32 tensor is float32
    cast = {name: copy.to(dtype) for name, copy in copies.items()}
    return _call_replaced(module, original, cast, args, kwargs)


@functools.lru_cache(maxsize=16)
def zero_bias(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [size], the same each time: do not write to them.

    A product with a bias of zeros is not replaced by one without a bias, which may be another kernel with
    other bits.
    """
    return torch.zeros(size, dtype=dtype, device=device)


def _call_replaced(
    module: nn.Module,
    original: Callable[..., Any],
    replacements: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:  # noqa: ANN401
    stored = {name: module._parameters[name] for name in replacements}
    try:
        for name, tensor in replacements.items():
            # nn.Module.__setattr__ refuses a plain tensor where a parameter is registered, so this goes
            # around it; the parameters come back below.
            module._parameters[name] = tensor  # type: ignore[assignment]
        return original(*args, **kwargs)
    finally:
        module._parameters.update(stored)


def cast_floats(values: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Return a value with all floating-point tensors in it cast."""

    def cast(value: Any) -> Any:  # noqa: ANN401
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, values)
