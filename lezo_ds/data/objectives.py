"""Training objectives, pure functions of a model's outputs (docs/rewards.md).

An objective is a loss to minimize and the layout of the batches that it reads. There are two kinds:

    reads logits     the model runs the gold text or the candidates once; the loss is a function
                     of the logits of the selected tokens. The tasks' own losses, and a user's
                     functions.
    reads answers    the model writes answers to prompts; the loss is a function of their texts.
                     F1, and a user's rewards.

A loss function returns one value for each example, and the loss of a step is the sum of these over
the weight of the batch. This module also has the scores by which candidates are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lezo_ds.data.batches import candidate_batch, teacher_forcing_batch
from lezo_ds.data.examples import EncodedExample
from lezo_ds.data.metrics import best_f1
from lezo_ds.data.rewards import Reward, Rewards, judges_answers
from lezo_ds.data.tasks import Task
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.registry import Registry, names_code
from lezo_ds.user_code import call_of_user, shown

ObjectiveFunction = Callable[[Any, MicroBatch], Tensor]
"""(the logits that the task's own loss reads, batch) -> loss of each example, float [examples].

`candidate_batch` and `teacher_forcing_batch` say what the logits are. `batch.labels` holds the
tensors that belong to them, and `batch.examples` the records as text. The loss of a step is the
mean over its batch.
"""


def candidate_scores(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return the mean log-probability of the tokens of each candidate, float32 [E, C].

    It is -inf where an example has fewer candidates. If the batch has one row per example, these
    are the logits of the candidates, float32 [E, C], which have the same softmax.

    Args:
        logits: the selected logits or log-probabilities of a `candidate_batch`.
        batch: this batch.
    """
    if "target_ids" not in batch.labels:
        return logits.float()
    num_tokens = (batch.labels["token_slots"] >= 0).sum(dim=1)
    means = -teacher_forcing_loss(logits, batch) / num_tokens  # [rows]
    return _gather(means, batch.labels["candidate_slots"], fill=float("-inf"))


def classification_loss(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return the cross-entropy over the candidates' scores, float32 [E]; see `candidate_scores`."""
    scores = candidate_scores(logits, batch)
    return F.cross_entropy(scores, batch.labels["label"], reduction="none")


def teacher_forcing_loss(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return the cross-entropy of the target tokens, summed over each sequence, float32 [rows].

    The model has returned their log-probabilities, [tokens], or logits, [tokens, vocabulary].
    """
    if logits.dim() == 1:
        return _sums(-logits, batch)
    losses = F.cross_entropy(logits.float(), batch.labels["target_ids"], reduction="none")
    return _sums(losses, batch)


def count_right_tokens(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return how many gold tokens of each example are the model's first choice, float32 [E]."""
    right = logits.argmax(dim=1) == batch.labels["target_ids"]
    return _sums(right.float(), batch)


@dataclass(frozen=True)
class Objective:
    """A loss to minimize, and the batches that it reads.

    Attributes:
        build_batch: (examples, pad id) -> batch; None if the loss reads generated answers.
        loss: (logits or answers, batch) -> summed loss of each example, [E]. The batch's weight is
            the number of terms in all these sums.
        rewards: the user's functions of answers, if the loss is minus their sum, which may be any
            finite number.
        counts_tokens: whether an example has a term for each token of its right candidate, instead
            of one.
        reads_texts: whether the loss reads the examples as texts.
    """

    build_batch: Callable[[Sequence[EncodedExample], int], MicroBatch] | None
    loss: ObjectiveFunction
    rewards: Rewards | None = None
    counts_tokens: bool = False
    reads_texts: bool = True

    @property
    def is_reward(self) -> bool:
        """Whether user functions judge answers."""
        return self.rewards is not None

    @property
    def reads_answers(self) -> bool:
        """Whether the loss reads the texts that the model writes."""
        return self.build_batch is None


LOSSES: Registry[Objective] = Registry("loss", "Task.loss", kind=Objective)
"""The tasks' own objectives, by their names in `Task.loss`."""
LOSSES.add("candidates", Objective(candidate_batch, classification_loss, reads_texts=False))
LOSSES.add(
    "tokens",
    Objective(teacher_forcing_batch, teacher_forcing_loss, counts_tokens=True, reads_texts=False),
)


def training_objective(task: Task) -> Objective:
    """Return the objective with which a task is trained, unless a recipe names another."""
    return LOSSES.find(task.loss)


def f1_loss(answers: Sequence[str], batch: MicroBatch) -> Tensor:
    """Return minus the best token F1 of each answer with its example's references, float64 [E]."""
    pairs = zip(answers, batch.examples, strict=True)
    losses = [-best_f1(answer, example.right_texts) for answer, example in pairs]
    return torch.tensor(losses, dtype=torch.float64)


def _f1_objective(task: Task) -> Objective:
    if not task.writes_answers:
        raise UserError(
            f"train.objective=f1 needs a task that generates answers, not {task.name}",
            fix="set train.objective=task",
        )
    return Objective(build_batch=None, loss=f1_loss)


OBJECTIVES: Registry[Callable[[Task], Objective]] = Registry("objective", "train.objective")
OBJECTIVES.add("task", training_objective)
OBJECTIVES.add("f1", _f1_objective)


def load_objective(objective: str | Mapping[str, float], task: Task) -> Objective:
    """Return the objective that `train.objective` names.

    Args:
        objective: one in OBJECTIVES; or package.module:function, which is a reward if
            `judges_answers`, and otherwise an `ObjectiveFunction`; or several rewards, each with
            its weight.
        task: the task of the run.

    Raises:
        UserError: there is no such objective, or it does not fit the task.
    """
    weights = {objective: 1.0} if isinstance(objective, str) else objective
    functions: dict[str, Any] = {name: OBJECTIVES.find(name) for name in weights}
    others = [name for name in functions if not judges_answers(functions[name])]
    if not others:
        judges = [Reward(name, functions[name], weights[name]) for name in weights]
        rewards = Rewards(tuple(judges))
        return Objective(build_batch=None, loss=rewards.loss, rewards=rewards)
    name = others[0]
    if not isinstance(objective, str):
        raise UserError(
            f"train.objective has weights, and {name} is not a reward",
            fix="list functions with the decorator `reward`, or of TRL's, or name one objective",
        )
    function = functions[name]
    if not names_code(name):
        return function(task)  # type: ignore[no-any-return]
    own = training_objective(task)

    def build_batch(examples: Sequence[EncodedExample], pad_id: int) -> MicroBatch:
        assert own.build_batch is not None
        # The task's own loss may be a mean over tokens, and a user's is one over examples.
        return replace(own.build_batch(examples, pad_id).with_logits(), weight=len(examples))

    def loss(logits: Tensor, batch: MicroBatch) -> Tensor:
        # A copy: what the function changes must not reach the next probe or step.
        own_batch = copy.deepcopy(batch)
        losses = call_of_user(f"train.objective={name}", function, logits, own_batch)
        shape = (len(batch.examples),)
        if isinstance(losses, Tensor) and losses.shape == shape and losses.is_floating_point():
            return losses
        raise UserError(
            f"train.objective={name} returned {shown(losses)}, not one loss per example",
            fix=f"return a float tensor of shape {shape}, or put @lezo_ds.reward before a function "
            "that judges answers",
        )

    return Objective(build_batch, loss)


def try_loss(objective: Objective, batch: MicroBatch, vocabulary_size: int) -> None:
    """Let a user's loss read logits that are all 0, so that it fails before weights are loaded.

    Args:
        objective: the loss, which reads logits.
        batch: what it built of an example.
        vocabulary_size: number of logits of a token, if the batch does not select some.
    """
    selection = batch.selection
    assert selection is not None
    num_entries = vocabulary_size
    if selection.vocabulary is not None:
        num_entries = len(selection.vocabulary)
    objective.loss(torch.zeros(len(selection.rows), num_entries), batch)


def _sums(of_tokens: Tensor, batch: MicroBatch) -> Tensor:
    """Return the sum of the values of the tokens [tokens] of each sequence, [sequences]."""
    return _gather(of_tokens, batch.labels["token_slots"], fill=0.0).sum(dim=1)


def _gather(values: Tensor, slots: Tensor, *, fill: float) -> Tensor:
    """Return the values [N] at `slots` (see batches.py), with `fill` where a slot is -1."""
    # A gather and a sum are deterministic. index_add on a GPU is not: it adds in a different order
    # each time.
    found = values[slots.clamp(min=0)]
    return torch.where(slots >= 0, found, fill)
