"""The input of a forward pass, and which output is needed: some logits, or a continuation.

StepBatch        all micro-batches of a step, the same on every rank
  MicroBatch     what one forward pass runs: tensors [rows, tokens], and how its output is read
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from lezo_ds.errors import UserError
from lezo_ds.zo.estimators import add_in_order

Tensors = Mapping[str, Tensor]
"""Tensors by name."""


@dataclass(frozen=True)
class LogitSelection:
    """The logits that a batch needs. The output head computes only these.

    Attributes:
        rows: int64 [N], the sequence of each row of logits.
        positions: int64 [N], the hidden state that is read. Its logits predict the next token.
        vocabulary: int64 [K], the entries of the vocabulary; None selects all of them.
        targets: int64 [N], the token whose log-probability is needed in the place of each row of
            logits; None if the logits are needed.

    The output has the shape [N, K], or [N] with targets: float32 log-probabilities.
    """

    rows: Tensor
    positions: Tensor
    vocabulary: Tensor | None = None
    targets: Tensor | None = None


@dataclass(frozen=True)
class GenerationSettings:
    """How a batch of prompts is continued.

    Attributes:
        max_new_tokens: most tokens of an answer.
        stop_ids: a row ends at the first of these tokens.
        pad_id: fills rows on the left of their prompt and after their end.
        stops: an answer is read up to the first of these strings.
        mark: an answer is read after the last of these tokens.
        has_ended: (new tokens of a row) -> whether the row ends here. It finds stop strings that
            spread over several tokens; None if there are none.
        temperature: divides the logits if tokens are drawn, which they are if prompts have keys.
        top_p: draw from the most probable tokens that have this probability together; None draws
            from all of them.
        streamer: a streamer of transformers, which gets the tokens of the only row one by one.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    stops: tuple[str, ...] = ("\n",)
    mark: str = "</think>"
    has_ended: Callable[[Sequence[int]], bool] | None = None
    temperature: float = 0.0
    top_p: float | None = None
    streamer: Any = None


@dataclass(frozen=True)
class Prompts:
    """What is known of the prompts of a batch, besides their tokens.

    Attributes:
        settings: how they are continued.
        sample_keys: int64 [rows], the key of each row's random numbers; None if no token is drawn.
        common_ids: int64 [directions, n], the tokens with which all prompts begin, once for each
            direction in which they are read; None if they are not read on their own.
    """

    settings: GenerationSettings
    sample_keys: Tensor | None = None
    common_ids: Tensor | None = None

    def repeated(self, num_copies: int) -> Prompts:
        """Return the prompts of several copies of a batch, one after the other."""

        def copies(rows: Tensor | None) -> Tensor | None:
            return None if rows is None else torch.cat([rows] * num_copies)

        return Prompts(self.settings, copies(self.sample_keys), copies(self.common_ids))


@dataclass(frozen=True)
class MicroBatch:
    """The part of a step's batch that one forward pass runs.

    Attributes:
        inputs: keyword arguments of the model's forward. The first dimension of each is the rows.
        weight: number of examples or tokens that the mean loss of a step counts.
        labels: what the loss function reads besides the logits.
        selection: the logits that are needed; None selects all: [rows, tokens, vocabulary].
        prompts: if they are set, the output is new tokens, int64 [rows, at most max_new_tokens].
        examples: of the rows, for objectives that read text: `lezo_ds.data.tasks.Example` each.
        token_examples: int64 [rows, tokens] on the CPU, the index of the example that each token
            belongs to; [rows, 1] if all tokens of a row belong to one. None: each example has the
            same number of rows, one after the other.
    """

    inputs: Tensors
    weight: float
    labels: Tensors = field(default_factory=dict)
    selection: LogitSelection | None = None
    prompts: Prompts | None = None
    examples: tuple[Any, ...] = ()
    token_examples: Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensors in (("inputs", self.inputs), ("labels", self.labels)):
            if not isinstance(tensors, Mapping) or not all(map(torch.is_tensor, tensors.values())):
                raise UserError(
                    f"the {name} of a micro-batch are of type {type(tensors).__name__}, or have a "
                    "value that is not a tensor",
                    fix="pass a dict of tensors by name",
                )
        if not 0 <= self.weight < math.inf:
            raise UserError(
                f"the weight of a micro-batch is {self.weight}",
                fix="pass the number of examples or tokens that its losses count",
            )

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return next(iter(self.inputs.values())).device

    @property
    def num_examples(self) -> int:
        """Number of examples. Without `examples` and `token_examples`, each row is one."""
        if self.examples:
            return len(self.examples)
        if self.token_examples is not None:
            return int(self.token_examples.max()) + 1
        return len(next(iter(self.inputs.values())))

    def with_logits(self) -> MicroBatch:
        """Return a batch that selects logits, where this one selects log-probabilities."""
        assert self.selection is not None
        return replace(self, selection=replace(self.selection, targets=None))


LossFunction = Callable[[Tensor, MicroBatch], Tensor]
"""(what the pass returns at one probe, micro-batch) -> summed loss of each example, [examples]."""


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return the micro-batch with all its tensors on `device`.

    A copy to a GPU does not wait for work that is queued there.
    """

    def move(tensors: Tensors) -> dict[str, Tensor]:
        return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}

    selection = batch.selection
    if selection is not None:
        given = {name: tensor for name, tensor in vars(selection).items() if tensor is not None}
        selection = LogitSelection(**move(given))
    return replace(batch, inputs=move(batch.inputs), labels=move(batch.labels), selection=selection)


class StepBatch:
    """All micro-batches of a step. Each is laid out when it is first read. A rank reads its own.

    Args:
        weights: of each micro-batch, known without laying it out.
        build: (index) -> micro-batch.
        content: identifies the batch, by the indices of its examples. Ranks compare it, or the
            tensors of all micro-batches if it is None.
        num_examples: in all micro-batches; None if they have unequally many.
        may_lack_losses: whether a loss may be NaN, as that of an answer that no reward judges.

    Attributes:
        read: the indices of the micro-batches that have been read.
    """

    def __init__(
        self,
        weights: Sequence[float],
        build: Callable[[int], MicroBatch],
        content: bytes | None,
        num_examples: int | None,
        *,
        may_lack_losses: bool = False,
    ) -> None:
        self.weights = weights
        self.content = content
        self.num_examples = num_examples
        self.may_lack_losses = may_lack_losses
        self.read: set[int] = set()
        self._build = cache(build)

    @classmethod
    def of(cls, batch: StepBatch | Sequence[MicroBatch]) -> StepBatch:
        """Return a batch, which may be a sequence of micro-batches that are laid out already.

        Raises:
            UserError: it has other things, or nothing.
        """
        if isinstance(batch, StepBatch):
            return batch
        is_sequence = isinstance(batch, Sequence) and len(batch) > 0
        if not is_sequence or not all(isinstance(each, MicroBatch) for each in batch):
            raise UserError(
                "the batch of a step is not a list of MicroBatch objects",
                fix="pass [lezo_ds.forward.batch.MicroBatch(inputs, weight), ...]",
            )
        weights = [micro_batch.weight for micro_batch in batch]
        sizes = [micro_batch.num_examples for micro_batch in batch]
        num_examples = sum(sizes) if len(set(sizes)) == 1 else None
        return cls(weights, batch.__getitem__, None, num_examples)

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, index: int) -> MicroBatch:
        self.read.add(index)
        micro_batch = self._build(index)
        assert micro_batch.weight == self.weights[index]
        return micro_batch

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def total_weight(self) -> float:
        """What the summed losses of a probe are divided by."""
        return add_in_order(self.weights)
