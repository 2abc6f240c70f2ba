"""What one forward pass is given, and which of its logits are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class LogitSelection:
    """The logits a batch needs, so that the output head computes no others.

    Attributes:
        rows: int64 [N], sequence index of each wanted logit row.
        positions: int64 [N], token position in that sequence whose hidden state is read
            (the logits there predict the token at position + 1).
        vocabulary: int64 [K], the vocabulary entries wanted, or None for all of them.

    The head then returns logits [N, K] (or [N, vocabulary size]).
    """

    rows: Tensor
    positions: Tensor
    vocabulary: Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """The share of a step's batch that runs in one forward pass.

    Attributes:
        inputs: keyword arguments of the model's forward; tensors, batch dimension first.
        weight: how many terms of the mean loss it holds (examples, or tokens): the loss of a step is
            the sum of all losses of its micro-batches over the sum of their weights.
        labels: tensors the loss function reads besides the logits.
        selection: the logits wanted; None for the model's full logits [rows, tokens, vocabulary].
    """

    inputs: Mapping[str, Tensor]
    weight: float
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    selection: LogitSelection | None = None


LossFunction = Callable[[Tensor, MicroBatch], Tensor]
"""(logits at one sign, micro-batch) -> summed loss of each example, float32 [examples]."""
