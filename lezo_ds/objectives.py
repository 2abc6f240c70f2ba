"""Losses to train on and scores to choose by, from the logits a batch asked for (Malladi et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lezo_ds.batch import LossFunction, MicroBatch
from lezo_ds.batching import candidate_batch, teacher_forcing_batch
from lezo_ds.encoding import EncodedExample
from lezo_ds.tasks.base import TaskKind


def candidate_scores(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Score each candidate by the mean log-probability of its tokens.

    Args:
        logits: [E, C] or [N, vocabulary size], any float type, as `batch.selection` asks.
        batch: from `candidate_batch`.

    Returns:
        float32 [E, C], -inf where an example has fewer candidates. From a batch of one row an
        example these are the candidates' logits: off by a constant of each example, so that only
        their differences within an example mean anything.
    """
    if "target_ids" not in batch.labels:
        return logits.float()
    slots = batch.labels["token_slots"]
    sums = _gather(-_token_losses(logits, batch), slots, 0.0).sum(dim=1)
    return _gather(sums / (slots >= 0).sum(dim=1), batch.labels["candidate_slots"], float("-inf"))


def classification_loss(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Cross-entropy over the candidates' scores, float32 [E]; arguments as in `candidate_scores`."""
    return F.cross_entropy(candidate_scores(logits, batch), batch.labels["label"], reduction="none")


def teacher_forcing_loss(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Cross-entropy of the gold tokens, summed over each example, float32 [E].

    Args:
        logits: [N, vocabulary size], any float type.
        batch: from `teacher_forcing_batch`; its weight N makes the step's loss a mean over tokens.
    """
    return _gather(_token_losses(logits, batch), batch.labels["token_slots"], 0.0).sum(dim=1)


@dataclass(frozen=True)
class Objective:
    """How a kind of task is trained: (examples, pad id) -> batch, and the batch's loss."""

    build_batch: Callable[[Sequence[EncodedExample], int], MicroBatch]
    loss: LossFunction


def training_objective(kind: TaskKind) -> Objective:
    """Return what MeZO trains a kind of task on."""
    if kind == "classification":
        return Objective(candidate_batch, classification_loss)
    return Objective(teacher_forcing_batch, teacher_forcing_loss)


def predictions(scores: Tensor) -> list[int]:
    """Pick the best candidate of each example from scores [E, C]; the first of equals."""
    best: list[int] = scores.argmax(dim=1).tolist()
    return best


def _token_losses(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return minus the log-probability of every target token, float32 [N]."""
    return F.cross_entropy(logits.float(), batch.labels["target_ids"], reduction="none")


def _gather(values: Tensor, slots: Tensor, fill: float) -> Tensor:
    # A gather and a sum, not index_add: on a GPU that one adds in an order of its own each time.
    return torch.where(slots >= 0, values[slots.clamp(min=0)], fill)
