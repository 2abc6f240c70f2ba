"""Scoring of examples, shared among the ranks; the same result on any number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lezo_ds import distributed
from lezo_ds.batch import MicroBatch
from lezo_ds.batching import candidate_batch
from lezo_ds.metrics import accuracy, majority_class_rate
from lezo_ds.objectives import candidate_scores, predictions, training_objective
from lezo_ds.task_data import EncodedSplit, TaskData


@dataclass(frozen=True)
class EvaluationResult:
    """How a model does on a set of examples.

    Attributes:
        loss: mean of the training loss over them.
        score: the task's metric, 0 to 1.
        majority_class: accuracy of always giving the most frequent label; None where that means nothing.
        predicted: index of the candidate chosen for each example, in their order.
    """

    loss: float
    score: float
    majority_class: float | None
    predicted: tuple[int, ...]


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
        """Return the logits of a micro-batch. A collective."""
        ...


def evaluate(engine: Model, data: TaskData, split: EncodedSplit, batch_size: int) -> EvaluationResult:
    """Score every example by the mean log-probability of its candidates. A collective.

    Examples are sorted by length, so that a batch has little padding, and cut into batches that do not depend
    on the number of ranks; every rank runs the same number of forward passes.

    Args:
        engine: the model, at its current weights.
        kind: of the task.
        data: the task and its tokenizer.
        split: n examples, all labelled.
        batch_size: examples a forward pass.
    """
    kind, pad_id = data.task.kind, data.tokenizer.pad_id
    examples, encoded = split.examples, split.encoded
    order = sorted(range(len(encoded)), key=lambda i: max(len(sequence) for sequence in encoded[i].sequences))
    groups = [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]
    objective = training_objective(kind)
    # Slots: the choice of each example, its summed loss, and the weight of each batch.
    choices = torch.zeros(len(encoded), dtype=torch.float64)
    losses = torch.zeros(len(encoded), dtype=torch.float64)
    weights = torch.zeros(len(groups), dtype=torch.float64)

    def score(group: Sequence[int], run: Callable[[MicroBatch], Tensor]) -> tuple[Tensor, Tensor, float]:
        chosen = [encoded[i] for i in group]
        batch = candidate_batch(chosen, pad_id)
        logits = run(batch)
        choice = torch.tensor(predictions(candidate_scores(logits, batch)), dtype=torch.float64)
        if kind != "classification":
            batch = objective.build_batch(chosen, pad_id)
            logits = run(batch)
        return choice, objective.loss(logits, batch).double().cpu(), batch.weight

    for number, index in _shares(len(groups), engine.world_size, engine.global_rank):
        group = groups[index]
        choice, loss, weight = score(group, lambda batch: engine.forward(batch).cpu())
        if number < len(groups):
            choices[group], losses[group], weights[index] = choice, loss, weight
    summed = distributed.sum_vector(torch.cat([choices, losses, weights]).to(engine.device))
    n = len(encoded)
    predicted = tuple(int(choice) for choice in summed[:n])
    return EvaluationResult(
        loss=sum(summed[n : 2 * n]) / sum(summed[2 * n :]),
        score=accuracy(predicted, examples),
        majority_class=majority_class_rate(examples),
        predicted=predicted,
    )


def _shares(num_groups: int, world_size: int, rank: int) -> list[tuple[int, int]]:
    """Return (position, group) of the passes a rank runs; positions past the last group repeat it, uncounted.

    >>> _shares(3, 2, 1)
    [(1, 1), (3, 2)]
    """
    rounds = -(-num_groups // world_size)
    positions = [step * world_size + rank for step in range(rounds)]
    return [(position, min(position, num_groups - 1)) for position in positions]
