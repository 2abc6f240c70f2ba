"""Training objectives, pure functions of a model's outputs (docs/rewards.md), and scores of candidates."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lezo_ds.data.batches import candidate_batch, teacher_forcing_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.errors import LezoError, UserError
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.registry import Registry, names_code
from lezo_ds.tasks import Task
from lezo_ds.tasks.base import Example, Record, TaskKind
from lezo_ds.tasks.metrics import best_f1

ObjectiveFunction = Callable[[Any, MicroBatch], Tensor]
"""(the logits that the task's own loss reads, batch) -> loss of each example, float [examples].

`candidate_batch` and `teacher_forcing_batch` say what the logits are. `batch.labels` holds the tensors that
belong to them, and `batch.examples` the records as text. The loss of a step is the mean over its batch.
"""

RewardFunction = Callable[[Sequence[str], Sequence[Record]], Any]
"""(answers, record of each with all its fields) -> a number for each. Samples of a record are neighbors."""

_TRIED_ANSWERS = ("", "A first answer, with words and 2 numbers: 3.")


def candidate_scores(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return the mean log-probability of the tokens of each candidate of a `candidate_batch`, float32 [E, C].

    It is -inf where an example has fewer candidates. If the batch has one row per example, these are logits.
    """
    if "target_ids" not in batch.labels:
        return logits.float()
    slots = batch.labels["token_slots"]
    sums = _gather(-_token_losses(logits, batch), slots, 0.0).sum(dim=1)
    return _gather(sums / (slots >= 0).sum(dim=1), batch.labels["candidate_slots"], float("-inf"))


def classification_loss(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return the cross-entropy over the candidates' scores, float32 [E]; see `candidate_scores`."""
    return F.cross_entropy(candidate_scores(logits, batch), batch.labels["label"], reduction="none")


def teacher_forcing_loss(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return the cross-entropy of the gold tokens, summed over each example, float32 [E]."""
    return _gather(_token_losses(logits, batch), batch.labels["token_slots"], 0.0).sum(dim=1)


def count_right_tokens(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return how many gold tokens of each example are the model's first choice, float32 [E]."""
    right = logits.argmax(dim=1) == batch.labels["target_ids"]
    return _gather(right.float(), batch.labels["token_slots"], 0.0).sum(dim=1)


@dataclass(frozen=True)
class Objective:
    """A loss to minimize, and the batches that it reads."""

    build_batch: Callable[[Sequence[EncodedExample], int], MicroBatch] | None
    """(examples, pad id) -> batch; None if the loss reads generated answers."""
    loss: ObjectiveFunction
    """(logits or answers, batch) -> summed loss of each example. The batch's weight is the number of terms in
    all these sums."""
    is_reward: bool = False
    num_terms: Callable[[EncodedExample], int] = lambda _: 1
    """The part of an example in its batch's weight."""

    @property
    def reads_answers(self) -> bool:
        return self.build_batch is None


def training_objective(kind: TaskKind) -> Objective:
    """Return the objective with which MeZO trains a kind of task."""
    if kind == "classification":
        return Objective(candidate_batch, classification_loss)
    return Objective(
        teacher_forcing_batch, teacher_forcing_loss, num_terms=EncodedExample.num_gold_tokens
    )


def f1_loss(answers: Sequence[str], batch: MicroBatch) -> Tensor:
    """Return minus the best token F1 of each answer with its example's references, float64 [E]."""
    pairs = zip(answers, batch.examples, strict=True)
    return torch.tensor(
        [-best_f1(answer, e.references) for answer, e in pairs], dtype=torch.float64
    )


def reward(function: RewardFunction) -> RewardFunction:
    """Mark a function that gives each generated answer a reward. Training maximizes the reward."""
    function.is_reward = True  # type: ignore[attr-defined]
    return function


def _f1_objective(task: Task) -> Objective:
    if task.kind != "generation":
        what = f"train.objective=f1 needs a task that generates answers, not {task.name}"
        raise UserError(what, fix="set train.objective=task")
    return Objective(build_batch=None, loss=f1_loss)


OBJECTIVES: Registry[Callable[[Task], Objective]] = Registry("objective", "train.objective")
OBJECTIVES.add("task", lambda task: training_objective(task.kind))
OBJECTIVES.add("f1", _f1_objective)


def load_objective(name: str, task: Task) -> Objective:
    """Return the objective that `train.objective` names: one in OBJECTIVES, or package.module:function."""
    if not names_code(name):
        return OBJECTIVES.find(name)(task)
    function: Any = OBJECTIVES.find(name)
    if getattr(function, "is_reward", False):
        return Objective(build_batch=None, loss=_reward_loss(name, function), is_reward=True)
    own = training_objective(task.kind)

    def build_batch(examples: Sequence[EncodedExample], pad_id: int) -> MicroBatch:
        assert own.build_batch is not None
        # The task's own loss may be a mean over tokens.
        return replace(own.build_batch(examples, pad_id), weight=len(examples))

    def loss(logits: Tensor, batch: MicroBatch) -> Tensor:
        losses = _call(name, function, logits, batch)
        shape = (len(batch.examples),)
        if not (
            isinstance(losses, Tensor) and losses.is_floating_point() and losses.shape == shape
        ):
            shown = (
                f"{losses.dtype} {tuple(losses.shape)}"
                if isinstance(losses, Tensor)
                else repr(losses)
            )
            what = f"train.objective={name} returned {shown}, not one loss per example"
            raise UserError(what, fix=f"return a float tensor of shape {shape}")
        return losses

    return Objective(build_batch, loss)


def _reward_loss(name: str, function: RewardFunction) -> ObjectiveFunction:
    def loss(answers: Sequence[str], batch: MicroBatch) -> Tensor:
        values = _call(
            name, function, list(answers), [example.record for example in batch.examples]
        )
        try:
            rewards = torch.as_tensor(values, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            rewards = torch.empty(())
        if rewards.shape != (len(answers),) or not rewards.isfinite().all():
            what = f"train.objective={name} returned {str(values)[:80]}, not one finite reward per answer"
            raise UserError(
                what, fix=f"return a list of {len(answers)} numbers, in the order of the answers"
            )
        return -rewards

    return loss


def try_reward(objective: Objective, examples: Sequence[Example]) -> None:
    """Let a reward judge answers to a few examples, so that a function that fails does so at once."""
    asked = [example for example in examples[:2] for _ in _TRIED_ANSWERS]
    answers = [answer for _ in examples[:2] for answer in _TRIED_ANSWERS]
    objective.loss(answers, MicroBatch({}, len(asked), examples=tuple(asked)))


def _call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except LezoError:
        raise
    except Exception as error:
        *_, (place, line) = traceback.walk_tb(error.__traceback__)
        where = (
            "" if place.f_code is _call.__code__ else f" ({place.f_code.co_filename} line {line})"
        )
        shown = f"{type(error).__name__}: {error}{where}"
        raise UserError(
            f"train.objective={name} failed: {shown}", fix="correct the function"
        ) from error


def _token_losses(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return minus the log-probability of every target token, float32 [N]."""
    return F.cross_entropy(logits.float(), batch.labels["target_ids"], reduction="none")


def _gather(values: Tensor, slots: Tensor, fill: float) -> Tensor:
    # A gather and a sum are deterministic. index_add on a GPU is not: it adds in a different order each time.
    return torch.where(slots >= 0, values[slots.clamp(min=0)], fill)
