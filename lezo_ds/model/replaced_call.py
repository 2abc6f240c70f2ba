"""Calls a module with perturbed copies instead of its own parameters, in the right precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.pytorch_utils import Conv1D

_BIAS_LAST = (nn.Linear.forward, Conv1D.forward)
"""The forwards known to be matrix product + bias, so that the bias can be added after them."""


def copy_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter's perturbed copies: float32 for vectors, else the parameter's own.

    Around 1.0 a 16-bit LayerNorm weight is too coarse to hold theta + mu z.
    """
    return torch.float32 if parameter.dim() == 1 else parameter.dtype


def call_with_copies(
    module: nn.Module,
    original: Callable[..., Any],
    copies: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:  # noqa: ANN401
    """Call a module with perturbed copies instead of its parameters.

    Copies of one dimension are float32. In 16-bit models a module that holds nothing else (a norm) then runs
    in float32, and the bias of a linear module is added in float32; the output is cast back. In any other
    16-bit module they are cast to 16 bits, because it is not known what the module does with them.

    Args:
        module: whose parameters are replaced.
        original: its forward.
        copies: by the name of the module's parameter.
        args: of the forward.
        kwargs: of the forward.
    """
    parameter = module._parameters[next(iter(copies))]
    assert parameter is not None, "copies are those of parameters"
    dtype = parameter.dtype
    if dtype == torch.float32:
        return _call_replaced(module, original, copies, args, kwargs)
    if _holds_only_vectors(module):
        vectors = {name: parameter.float() for name, parameter in _parameters(module).items()}
        args, kwargs = _cast_floats((list(args), dict(kwargs)), torch.float32)
        output = _call_replaced(module, original, vectors | dict(copies), args, kwargs)
        return _cast_floats(output, dtype)
    cast = {name: copy.to(dtype) for name, copy in copies.items()}
    if type(module).forward in _BIAS_LAST and "bias" in copies:
        without_bias = cast | {"bias": torch.zeros_like(cast["bias"])}
        output = _call_replaced(module, original, without_bias, args, kwargs)
        return (output + copies["bias"]).to(dtype)  # the sum of a 16-bit and a float32 tensor is float32
    return _call_replaced(module, original, cast, args, kwargs)


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


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def _holds_only_vectors(module: nn.Module) -> bool:
    has_children = next(module.children(), None) is not None
    return not has_children and all(parameter.dim() == 1 for parameter in _parameters(module).values())


def _cast_floats(values: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401
    def cast(value: Any) -> Any:  # noqa: ANN401
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, values)
