"""What is minimised, and the scores to choose by (Malladi et al. 2023).

Zeroth-order steps need no gradient of what they minimise, so it may be any function of the model's outputs.
`train.objective` names it: "task" for the task's own loss, "f1" for minus the F1 of generated answers, or
"package.module:function" for a Python function `objective(outputs, batch) -> loss of each example`:

outputs: the logits the task's own loss reads (see `candidate_batch` and `teacher_forcing_batch`), or, under
    the decorator `reads_answers`, a list with the answer the model writes to each example.
batch: a MicroBatch; `batch.examples` are the records as text, `batch.labels` the tensors beside the logits.
returns: a float tensor [examples]; its mean over a step's whole batch is the loss.

The function must be a pure one: it runs for both signs of a perturbation, on every rank for other examples,
and its mean over the dev examples picks the best step. For instance, in a file my_objectives.py that lies in
a folder of PYTHONPATH, with train.objective=my_objectives:mistakes or =my_objectives:wordiness:

    import torch
    from lezo_ds.data.objectives import candidate_scores, reads_answers

    def mistakes(logits, batch):
        "1 for each example whose best candidate is wrong: accuracy itself, which has no gradient."
        return (candidate_scores(logits, batch).argmax(dim=1) != batch.labels["label"]).float()

    @reads_answers
    def wordiness(answers, batch):
        "How many words an answer has more than the first of the right ones."
        pairs = zip(answers, batch.examples)
        extra = [len(answer.split()) - len(example.references[0].split()) for answer, example in pairs]
        return torch.tensor(extra).float()
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lezo_ds.data.batching import candidate_batch, teacher_forcing_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.metrics import best_f1
from lezo_ds.errors import UserError
from lezo_ds.model.batch import MicroBatch
from lezo_ds.tasks.base import Task, TaskKind

ObjectiveFunction = Callable[[Any, MicroBatch], Tensor]
"""(logits or answers, batch) -> loss of each example, float [examples]."""


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
    """What is minimised.

    Attributes:
        build_batch: (examples, pad id) -> batch, for a loss of logits; None for one of generated answers.
        loss: (logits, batch) or (answers, batch) -> summed loss of each example, float [examples]; the
            batch's weight says of how many terms they are the sums.
    """

    build_batch: Callable[[Sequence[EncodedExample], int], MicroBatch] | None
    loss: ObjectiveFunction

    @property
    def reads_answers(self) -> bool:
        """Whether the model is to write answers for it."""
        return self.build_batch is None


def training_objective(kind: TaskKind) -> Objective:
    """Return what MeZO trains a kind of task on."""
    if kind == "classification":
        return Objective(candidate_batch, classification_loss)
    return Objective(teacher_forcing_batch, teacher_forcing_loss)


def f1_loss(answers: Sequence[str], batch: MicroBatch) -> Tensor:
    """Minus the token F1 of each answer with the nearest of its example's references, float64 [E]."""
    pairs = zip(answers, batch.examples, strict=True)
    return torch.tensor([-best_f1(answer, e.references) for answer, e in pairs], dtype=torch.float64)


def reads_answers(function: ObjectiveFunction) -> ObjectiveFunction:
    """Mark an objective as one of the answers a model writes: it is given a list of texts, not logits."""
    function.reads_answers = True  # type: ignore[attr-defined]
    return function


def load_objective(name: str, task: Task) -> Objective:
    """Return what `train.objective` names.

    Args:
        name: "task", "f1" or "package.module:function".
        task: it is for.

    Raises:
        UserError: there is no such objective, or it does not fit the task.
    """
    own = training_objective(task.kind)
    if name == "task":
        return own
    if name == "f1":
        return _f1_objective(task)
    function = _import_function(name)
    checked = _checked(name, function)
    if getattr(function, "reads_answers", False):
        return Objective(None, checked)

    def build_batch(examples: Sequence[EncodedExample], pad_id: int) -> MicroBatch:
        assert own.build_batch is not None
        return replace(own.build_batch(examples, pad_id), weight=len(examples))

    return Objective(build_batch, checked)


def _f1_objective(task: Task) -> Objective:
    if task.metric != "f1":
        raise UserError(
            f"train.objective=f1 does not fit task {task.name}",
            got=f"a task scored by {task.metric}",
            expected="a task that generates answers: squad or drop",
            fix="set train.objective=task",
        )
    return Objective(None, f1_loss)


def _import_function(name: str) -> ObjectiveFunction:
    module_name, colon, function_name = name.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), function_name]):
        raise UserError(
            "train.objective is not valid",
            got=name,
            expected="task, f1 or package.module:function",
            fix="name a function as module:function",
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except ImportError as error:
        raise UserError(
            f"the module of train.objective={name} cannot be imported",
            got=f"{type(error).__name__}: {error}",
            expected=f"{module_name} installed, or in a folder of PYTHONPATH",
            fix="add its folder to PYTHONPATH",
        ) from error
    if not callable(function):
        raise UserError(
            f"train.objective={name} names no function",
            got=f"{type(function).__name__} {function_name} in {module_name}",
            expected="objective(outputs, batch) -> float tensor [examples]",
            fix=f"define {function_name} in {module_name}",
        )
    return function  # type: ignore[no-any-return]


def _checked(name: str, function: ObjectiveFunction) -> ObjectiveFunction:
    def loss(outputs: Any, batch: MicroBatch) -> Tensor:  # noqa: ANN401
        losses: object = function(outputs, batch)
        expected = (len(batch.examples),)
        if isinstance(losses, Tensor) and losses.is_floating_point() and losses.shape == expected:
            return losses
        shown = f"{losses.dtype} {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
        raise UserError(
            f"train.objective={name} returned no loss of each example",
            got=shown,
            expected=f"a float tensor of shape {expected}",
            fix="return one float an example, in their order",
        )

    return loss


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
