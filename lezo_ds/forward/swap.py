"""Modules that run with perturbed copies in the place of their parameters.

Copies have the dtype of their parameter, but for norms of 16 bits: these hold nothing but vectors
near 1, where 16 bits are too coarse for theta + mu z. They get float32 copies, and then compute in
float32. The biases of 16-bit products are perturbed in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from lezo_ds.forward.probes import Place


@contextmanager
def swapped(places: Sequence[Place], copies: Sequence[Tensor]) -> Iterator[None]:
    """Let modules read the copies, one for each place, while this lasts."""
    # nn.Module.__setattr__ refuses plain tensors where parameters are registered.
    tables: list[dict[str, Any]] = [place.owner._parameters for place in places]
    for table, place, copy in zip(tables, places, copies, strict=True):
        table[place.key] = copy
    try:
        yield
    finally:
        for table, place in zip(tables, places, strict=True):
            table[place.key] = place.trained.parameter


def widen_norm(norm: nn.Module) -> None:
    """Let a norm of 16 bits compute in float32 while it has copies in float32."""
    own_forward = norm.forward
    table: dict[str, Any] = norm._parameters

    @wraps(own_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        own = {name: value for name, value in table.items() if value is not None}
        if all(value.dtype == dtype for value in own.values()):
            return own_forward(*args, **kwargs)
        table.update({name: value.float() for name, value in own.items()})
        try:
            wide_args = map(_wide, args)
            wide_kwargs = {name: _wide(value) for name, value in kwargs.items()}
            return own_forward(*wide_args, **wide_kwargs).to(dtype)
        finally:
            table.update(own)

    dtype = next(norm.parameters()).dtype
    if dtype != torch.float32:
        norm.forward = forward


def _wide(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.float() if is_float else value
