"""The input of a forward pass, and the output that is needed of it: some logits, or a continuation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lezo_ds.tasks.base import Example


@dataclass(frozen=True)
class LogitSelection:
    """The logits that a batch needs. The output head computes only these and returns [N, K]."""

    rows: Tensor  # int64 [N], the sequence of each row of logits
    positions: Tensor  # int64 [N], the hidden state that is read: its logits predict the next token
    vocabulary: Tensor | None = None  # int64 [K], entries of the vocabulary; None selects all


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float  # divides the logits, above 0
    top_p: float | None = (
        None  # draw from the most probable tokens that have this probability together
    )


@dataclass(frozen=True)
class GenerationSettings:
    """How a batch is continued."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]  # a row ends at the first of these tokens
    pad_id: int  # fills rows on the left and after their end
    stops: tuple[str, ...] = ("\n",)  # an answer is read up to the first of these strings
    # (new tokens of a row) -> whether the row ends here, for stop strings of several tokens
    has_ended: Callable[[Sequence[int]], bool] | None = None
    # None takes the most probable token. Otherwise a batch needs the input "sample_keys", int64 [rows].
    sampling: Sampling | None = None


@dataclass(frozen=True)
class MicroBatch:
    """The part of a step's batch that one forward pass runs."""

    inputs: Mapping[
        str, Tensor
    ]  # keyword arguments of the model's forward; the first dimension is the batch
    weight: float  # number of examples or tokens that the mean loss of a step counts
    labels: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # what the loss function reads besides logits
    selection: LogitSelection | None = None  # None selects all logits: [rows, tokens, vocabulary]
    generation: GenerationSettings | None = (
        None  # the output is new tokens: int64 [rows, <= max_new_tokens]
    )
    examples: tuple[Example, ...] = ()  # for objectives that read text


LossFunction = Callable[[Tensor, MicroBatch], Tensor]
"""Maps (logits or new tokens at one probe, micro-batch) to the summed loss of each example, [examples]."""


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return the micro-batch with all its tensors on `device`."""

    def move(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    selection = batch.selection
    if selection is not None:
        vocabulary = None if selection.vocabulary is None else selection.vocabulary.to(device)
        selection = LogitSelection(
            selection.rows.to(device), selection.positions.to(device), vocabulary
        )
    return replace(batch, inputs=move(batch.inputs), labels=move(batch.labels), selection=selection)


class StepBatch:
    """All micro-batches of a step. Each is built when it is first read: a rank reads only its own."""

    def __init__(
        self, weights: Sequence[float], build: Callable[[int], MicroBatch], content: bytes
    ) -> None:
        self.weights = weights  # of each micro-batch
        self.content = (
            content  # identifies the batch, by the indices of its examples; ranks compare it
        )
        self._build = build
        self._built: dict[int, MicroBatch] = {}

    @classmethod
    def of(cls, batch: StepBatch | Sequence[MicroBatch]) -> StepBatch:
        """Return a batch, which may be a sequence of micro-batches that are built already."""
        if isinstance(batch, StepBatch):
            return batch
        return cls([micro_batch.weight for micro_batch in batch], batch.__getitem__, content=b"")

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, index: int) -> MicroBatch:
        if index not in self._built:
            self._built[index] = self._build(index)
            assert self._built[index].weight == self.weights[index]
        return self._built[index]

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def total_weight(self) -> float:
        return sum(self.weights)
