"""Runs a linear module at all probes: one matrix product for each, and one kernel that adds all biases.

The outputs of the probes are written next to each other, so that nothing has to be concatenated. A perturbed
bias of a 16-bit model is not left to the product, because cuBLAS adds biases of the output's dtype only, and
16 bits are too coarse for theta + mu z (see `replaced_call.copy_dtype`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lezo_ds.forward.replaced_call import BIAS_LAST, zero_bias
from lezo_ds.noise import stacked


def is_product(
    original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], rows: int
) -> bool:
    """Return whether `product_at_probes` gives the bits of one call of a module for each probe.

    Args:
        original: the module's forward.
        args: of the forward.
        kwargs: of the forward.
        rows: number of rows of all copies of the batch. 1 allows any number.
    """
    if getattr(original, "__func__", None) not in BIAS_LAST or kwargs or len(args) != 1:
        return False
    (batch,) = args
    # For other inputs, torch may choose another kernel than that of a product of two matrices.
    is_known = isinstance(batch, Tensor) and batch.dim() in (2, 3) and batch.is_contiguous()
    return is_known and batch.shape[0] % rows == 0


def product_at_probes(
    module: nn.Module, copies: Mapping[str, Sequence[Tensor]], batch: Tensor, num_copies: int
) -> Tensor:
    """Return the output of `nn.Linear` or `Conv1D` at several probes.

    Args:
        module: holds the parameters that are not perturbed.
        copies: one of each probe, by the name of the parameter. Copies of the bias are float32, and are added
            in float32.
        batch: [num_copies * n, inputs] or [num_copies * n, tokens, inputs], contiguous.
        num_copies: number of probes.

    Returns:
        [num_copies * n, outputs] or [num_copies * n, tokens, outputs].
    """
    stored, bias = module._parameters["weight"], module._parameters["bias"]
    assert stored is not None, "a linear module has a weight"
    weights: Sequence[Tensor] = copies.get("weight") or [stored] * num_copies
    if isinstance(module, nn.Linear):
        weights = [weight.t() for weight in weights]
    num_outputs = weights[0].shape[1]
    output = batch.new_empty(*batch.shape[:-1], num_outputs)
    batches = batch.view(num_copies, -1, batch.shape[-1])
    outputs = output.view(num_copies, -1, num_outputs)
    added: Sequence[Tensor] | None = None if bias is None else copies.get("bias", [bias] * num_copies)
    is_added_later = "bias" in copies and stored.dtype != torch.float32
    if is_added_later:
        added = [zero_bias(num_outputs, stored.dtype, batch.device)] * num_copies
    for place, weight in enumerate(weights):
        if added is None:
            torch.mm(batches[place], weight, out=outputs[place])
        else:
            torch.addmm(added[place], batches[place], weight, out=outputs[place])
    if is_added_later:
        outputs.add_(stacked(copies["bias"])[:, None])  # a sum of 16 and 32 bits is rounded once, to 16
    return output
