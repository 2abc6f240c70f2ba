"""Scoring of examples, shared among the ranks; the same result on any number of them.

What is run (candidates behind their prompts, prompts to continue) is sorted by length, so that a batch has
little padding, and cut into batches that do not depend on the number of ranks. Every rank runs equally many;
each value is found by one rank, and all ranks get all values in one sum in which the others' are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from lezo_ds import distributed
from lezo_ds.data.batching import scoring_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.metrics import accuracy, majority_class_rate, mean_f1
from lezo_ds.data.objectives import predictions, teacher_forcing_loss, training_objective
from lezo_ds.data.task_data import EncodedSplit, TaskData
from lezo_ds.model.batch import MicroBatch, to_device

T = TypeVar("T")


@dataclass(frozen=True)
class EvaluationResult:
    """How a model does on a set of examples.

    Attributes:
        loss: what training minimises, over them.
        score: the task's metric, 0 to 1.
        majority_class: accuracy of always giving the most frequent label; None where that means nothing.
        predicted: for each example, in their order, the index of the candidate chosen, or the answer written.
    """

    loss: float
    score: float
    majority_class: float | None
    predicted: tuple[int | str, ...]


class Model(Protocol):
    """What scoring needs of an engine."""

    @property
    def global_rank(self) -> int:
        """Index of this process among all."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the logits, or the new tokens, that a micro-batch wants. A collective."""
        ...


def evaluate(engine: Model, data: TaskData, split: EncodedSplit, batch_size: int) -> EvaluationResult:
    """Score every example by the mean log-probability of its candidates, or by what is written to it.

    A collective. Calibrated scores are the summed log-probability of a candidate's tokens behind the prompt,
    minus that behind the null prompt.

    Args:
        engine: the model, at its current weights.
        data: the task, its tokenizer and the objective.
        split: at least one example, all labelled.
        batch_size: sequences a forward pass.
    """
    tokens = _new_tokens(engine, data, split, batch_size) if split.prompts else None
    if data.task.kind == "generation":
        assert tokens is not None
        answers = tuple(data.answers(tokens))
        loss = _objective_loss(engine, data, split, batch_size, tokens)
        return EvaluationResult(loss, mean_f1(answers, split.examples), None, answers)
    sums = _log_probabilities(engine, data, split.encoded, batch_size)
    if data.objective == training_objective(data.task.kind):
        loss = _task_loss(data, split, sums)
    else:
        loss = _objective_loss(engine, data, split, batch_size, tokens)
    predicted = tuple(predictions(_scores(engine, data, split, batch_size, sums)))
    score, majority = accuracy(predicted, split.examples), majority_class_rate(split.examples)
    return EvaluationResult(loss, score, majority, predicted)


def _scores(
    engine: Model, data: TaskData, split: EncodedSplit, batch_size: int, sums: Sequence[Tensor]
) -> Tensor:
    """Return the score of each candidate, float64 [examples, candidates], -inf where there are fewer."""
    if split.null_encoded:
        null_sums = _log_probabilities(engine, data, split.null_encoded, batch_size)
        return _padded([found - null for found, null in zip(sums, null_sums, strict=True)])
    return _padded(_means(split, sums))


def _task_loss(data: TaskData, split: EncodedSplit, sums: Sequence[Tensor]) -> float:
    """Return the task's own loss, which follows from what its scores are made of."""
    labels = [_label(example) for example in split.encoded]
    if data.task.kind == "classification":
        return F.cross_entropy(_padded(_means(split, sums)), torch.tensor(labels)).item()
    num_tokens = sum(e.option_lengths[label] for e, label in zip(split.encoded, labels, strict=True))
    golds = [found[label] for found, label in zip(sums, labels, strict=True)]
    return -torch.stack(golds).sum().item() / num_tokens


def _means(split: EncodedSplit, sums: Sequence[Tensor]) -> list[Tensor]:
    return [
        found / torch.tensor(example.option_lengths)
        for found, example in zip(sums, split.encoded, strict=True)
    ]


def _padded(scores: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(scores), batch_first=True, padding_value=float("-inf"))


def _log_probabilities(
    engine: Model, data: TaskData, encoded: Sequence[EncodedExample], batch_size: int
) -> list[Tensor]:
    """Return the summed log-probability of each candidate's tokens: for each example float64 [candidates].

    Equal sequences run once, and those that differ in their last token only run as one: what decides is read
    before it. So an example with one-token candidates takes one row, and one with many spreads over batches.
    """
    wanted = [list(zip(example.sequences, example.option_lengths, strict=True)) for example in encoded]
    distinct = sorted(set(chain.from_iterable(wanted)), key=lambda pair: (len(pair[0]), pair))
    rows = [list(same) for _, same in groupby(range(len(distinct)), key=lambda i: distinct[i][0][:-1])]
    groups = [list(chain.from_iterable(group)) for group in _cut(rows, batch_size)]

    def score(group: Sequence[int]) -> Tensor:
        sequences, lengths = zip(*(distinct[i] for i in group), strict=True)
        batch = to_device(scoring_batch(sequences, lengths, data.tokenizer.pad_id), engine.device)
        return -teacher_forcing_loss(engine.forward(batch), batch).cpu().unsqueeze(1)

    found = dict(zip(distinct, _share(engine, groups, 1, score).squeeze(1), strict=True))
    return [torch.stack([found[pair] for pair in pairs]) for pairs in wanted]


def _new_tokens(engine: Model, data: TaskData, split: EncodedSplit, batch_size: int) -> Tensor:
    """Return what the model writes behind each prompt, int64 [examples, max_new_tokens]."""
    assert data.generation is not None
    width = data.generation.max_new_tokens

    def write(group: Sequence[int]) -> Tensor:
        tokens = engine.forward(data.prompt_batch(split, group)).cpu()
        return F.pad(tokens, (0, width - tokens.shape[1]))  # a batch that is shorter ended with stop tokens

    return _share(engine, _groups([len(ids) for ids in split.prompts], batch_size), width, write).long()


def _objective_loss(
    engine: Model, data: TaskData, split: EncodedSplit, batch_size: int, tokens: Tensor | None
) -> float:
    """Return the objective's mean; `tokens` spare it the writing of answers, if it reads these."""
    known = tokens if data.objective.reads_answers else None
    longest = [example.num_tokens for example in split.encoded]

    def losses(group: Sequence[int]) -> Tensor:
        batch = to_device(data.objective_batch(split, group), engine.device)
        outputs = engine.forward(batch) if known is None else known[group]
        found = torch.zeros(len(group), 2, dtype=torch.float64)
        found[:, 0] = data.loss(outputs, batch)
        found[0, 1] = batch.weight
        return found

    loss, weight = _share(engine, _groups(longest, batch_size), 2, losses).sum(dim=0)
    return float(loss / weight)


def _share(
    engine: Model, groups: Sequence[Sequence[int]], width: int, run: Callable[[Sequence[int]], Tensor]
) -> Tensor:
    """Return float64 [items, width]; run(group) -> [items of the group, width] is called on one rank."""
    values = torch.zeros(sum(map(len, groups)), width, dtype=torch.float64)
    for number, index in _shares(len(groups), engine.world_size, engine.global_rank):
        found = run(groups[index])
        if number < len(groups):
            values[groups[index]] = found.double()
    summed = distributed.sum_vector(values.flatten().to(engine.device))
    return torch.tensor(summed, dtype=torch.float64).view(values.shape)


def _groups(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return the items in order of length, cut into batches.

    >>> _groups([3, 1, 2], batch_size=2)
    [[1, 2], [0]]
    """
    return _cut(sorted(range(len(lengths)), key=lambda i: lengths[i]), batch_size)


def _cut(items: list[T], size: int) -> list[list[T]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


def _shares(num_groups: int, world_size: int, rank: int) -> list[tuple[int, int]]:
    """Return (position, group) of the passes a rank runs; positions past the last group repeat it, uncounted.

    >>> _shares(3, 2, 1)
    [(1, 1), (3, 2)]
    """
    rounds = -(-num_groups // world_size)
    positions = [step * world_size + rank for step in range(rounds)]
    return [(position, min(position, num_groups - 1)) for position in positions]


def _label(example: EncodedExample) -> int:
    assert example.label is not None
    return example.label
