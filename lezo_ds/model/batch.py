"""What a model is given at once, and what is wanted of it: some logits, or a continuation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lezo_ds.tasks.base import Example


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
class GenerationSettings:
    """How prompts are continued, greedily.

    Attributes:
        max_new_tokens: at most so many tokens are written, at least 1.
        stop_ids: a row ends with the first of these it writes.
        pad_id: fills rows on the left, and behind their end; any id of the vocabulary.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int


@dataclass(frozen=True)
class MicroBatch:
    """The share of a step's batch that a rank runs at once.

    Attributes:
        inputs: keyword arguments of the model's forward; tensors, batch dimension first.
        weight: how many terms of the mean loss it holds (examples, or tokens): the loss of a step is
            the sum of all losses of its micro-batches over the sum of their weights.
        labels: tensors the loss function reads besides the logits.
        selection: the logits wanted; None for the model's full logits [rows, tokens, vocabulary].
        generation: where it is given, no logits are wanted, but int64 [rows, at most max_new_tokens]: the
            tokens the model writes behind its inputs.
        examples: the examples as text, for objectives that read them.
    """

    inputs: Mapping[str, Tensor]
    weight: float
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    selection: LogitSelection | None = None
    generation: GenerationSettings | None = None
    examples: tuple[Example, ...] = ()


LossFunction = Callable[[Tensor, MicroBatch], Tensor]
"""(logits, or new tokens, at one sign; micro-batch) -> summed loss of each example, float [examples]."""


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return the micro-batch with all its tensors on `device`."""

    def move(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    selection = batch.selection
    if selection is not None:
        vocabulary = None if selection.vocabulary is None else selection.vocabulary.to(device)
        selection = LogitSelection(selection.rows.to(device), selection.positions.to(device), vocabulary)
    return replace(batch, inputs=move(batch.inputs), labels=move(batch.labels), selection=selection)
