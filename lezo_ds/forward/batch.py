"""The input of one forward pass, and the output that is needed: some logits, or a continuation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lezo_ds.tasks.base import Example


@dataclass(frozen=True)
class LogitSelection:
    """The logits that a batch needs. The output head computes only these and returns [N, K].

    Attributes:
        rows: int64 [N], index of the sequence of each row of logits.
        positions: int64 [N], position in that sequence of the hidden state that is read. The logits there
            predict the token at position + 1.
        vocabulary: int64 [K], the needed entries of the vocabulary. None selects all of them.
    """

    rows: Tensor
    positions: Tensor
    vocabulary: Tensor | None = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits, above 0.
        top_p: draw from the most probable tokens that have this probability together; None for all.
    """

    temperature: float
    top_p: float | None = None


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of generation.

    Attributes:
        max_new_tokens: maximum number of new tokens, at least 1.
        stop_ids: a row ends at the first of these tokens.
        pad_id: fills rows on the left and after their end. It can be any id of the vocabulary.
        stops: texts that end an answer, which is read up to the first of them.
        has_ended: function (new tokens of a row) -> whether the row ends here, for ends of several tokens;
            None if there are none.
        sampling: how tokens are drawn; None takes the most probable token. A batch then needs the input
            "sample_keys", int64 [rows]: the keys of the rows' random numbers.
        keep_perturbed: whether perturbed weights are kept until all rows have ended.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    stops: tuple[str, ...] = ("\n",)
    has_ended: Callable[[Sequence[int]], bool] | None = None
    sampling: Sampling | None = None
    keep_perturbed: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """The part of a step's batch that a rank runs in one forward pass.

    Attributes:
        inputs: keyword arguments of the model's forward. The first dimension of each tensor is the batch.
        weight: number of terms of the mean loss in it (examples or tokens). The loss of a step is the sum of
            all losses of its micro-batches divided by the sum of their weights.
        labels: tensors that the loss function reads in addition to the logits.
        selection: the needed logits. None selects all: [rows, tokens, vocabulary].
        generation: if it is set, the output is not logits but the new tokens: int64 [rows, at most
            max_new_tokens].
        examples: the examples as text, for objectives that read them.
    """

    inputs: Mapping[str, Tensor]
    weight: float
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    selection: LogitSelection | None = None
    generation: GenerationSettings | None = None
    examples: tuple[Example, ...] = ()


LossFunction = Callable[[Tensor, MicroBatch], Tensor]
"""Maps (logits or new tokens at one probe, micro-batch) to the summed loss of each example, [examples]."""


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return the micro-batch with all its tensors on `device`."""

    def move(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    selection = batch.selection
    if selection is not None:
        vocabulary = None if selection.vocabulary is None else selection.vocabulary.to(device)
        selection = LogitSelection(selection.rows.to(device), selection.positions.to(device), vocabulary)
    return replace(batch, inputs=move(batch.inputs), labels=move(batch.labels), selection=selection)


class StepBatch:
    """All micro-batches of a step. Each is laid out when it is read first, and then kept.

    Args:
        weights: weight of each micro-batch, which is known before it is laid out.
        build: function (index) -> the micro-batch, the same on every rank. It has the weight given here.
        content: what the micro-batches are made of, such as the indices of their examples. Ranks compare it.
    """

    def __init__(self, weights: Sequence[float], build: Callable[[int], MicroBatch], content: bytes) -> None:
        self.weights = weights
        self.content = content
        self._build = build
        self._built: dict[int, MicroBatch] = {}

    @classmethod
    def of(cls, batch: StepBatch | Sequence[MicroBatch]) -> StepBatch:
        """Return a batch whose micro-batches may have been laid out already."""
        if isinstance(batch, StepBatch):
            return batch
        return cls([micro_batch.weight for micro_batch in batch], batch.__getitem__, b"")

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, index: int) -> MicroBatch:
        if index not in self._built:
            built = self._build(index)
            if built.weight != self.weights[index]:
                raise ValueError(f"micro-batch {index} has weight {built.weight}, not {self.weights[index]}")
            self._built[index] = built
        return self._built[index]

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def total_weight(self) -> float:
        """Number of terms of the mean loss of the step."""
        return sum(self.weights)
