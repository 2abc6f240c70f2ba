"""Training objectives, and the scores of candidates (Malladi et al. 2023).

A zeroth-order step needs no gradient, so the objective may be any function of the model's outputs.
`train.objective` names it: "task" for the task's own loss, "f1" for minus the F1 of generated answers, or
"package.module:function" for a Python function. A function with the decorator `reward` judges the answers
that the model writes, `reward(answers, records) -> reward of each answer`, and is maximized:

answers: a list of texts, written as `generation` in the recipe says. With generation.num_samples, those of
    one record come one after the other.
records: a list with the record of each answer: a dict of all its fields, also those that no prompt reads.
returns: a list of numbers, or a tensor [answers]. The loss of a step is minus their mean over its batch.

Any other function is a loss, `objective(outputs, batch) -> loss of each example`, and is minimized:

outputs: the logits that the task's own loss reads (see `candidate_batch` and `teacher_forcing_batch`). A
    function with the decorator `reads_answers` gets a list of the generated answers instead.
batch: a MicroBatch. `batch.examples` holds the records as text, `batch.labels` the tensors that belong to the
    logits.
returns: a float tensor [examples]. The loss is its mean over the whole batch of a step.

A function must be pure. It runs for both signs of a perturbation and on different examples on each rank,
and its mean over the dev examples selects the best step. For instance, put this into a file my_objectives.py
in a folder on PYTHONPATH, and set train.objective=my_objectives:mistakes, =my_objectives:wordiness or
=my_objectives:brevity:

    import torch
    from lezo_ds.data.objectives import candidate_scores, reads_answers, reward

    def mistakes(logits, batch):
        "1 for each example whose best candidate is wrong: the error rate itself, which has no gradient."
        return (candidate_scores(logits, batch).argmax(dim=1) != batch.labels["label"]).float()

    @reads_answers
    def wordiness(answers, batch):
        "How many more words an answer has than the first of the right answers."
        pairs = zip(answers, batch.examples)
        extra = [len(answer.split()) - len(example.references[0].split()) for answer, example in pairs]
        return torch.tensor(extra).float()

    @reward
    def brevity(answers, records):
        "1 for each answer that is not longer than its record allows: the field most_words."
        pairs = zip(answers, records)
        return [float(len(answer.split()) <= record["most_words"]) for answer, record in pairs]
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lezo_ds.data.batching import candidate_batch, teacher_forcing_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.errors import LezoError, UserError
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.registry import Registry, import_named
from lezo_ds.tasks.base import Record, Task, TaskKind
from lezo_ds.tasks.metrics import best_f1

ObjectiveFunction = Callable[[Any, MicroBatch], Tensor]
"""A function (logits or answers, batch) -> loss of each example, float [examples]."""

RewardFunction = Callable[[Sequence[str], Sequence[Record]], Any]
"""A function (answers, record of each answer) -> reward of each answer: numbers, or a tensor [answers]."""


def candidate_scores(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Score each candidate by the mean log-probability of its tokens.

    Args:
        logits: [E, C] or [N, vocabulary size], any float type, as `batch.selection` selects them.
        batch: from `candidate_batch`.

    Returns:
        float32 [E, C], -inf where an example has fewer candidates. If the batch has one row per example,
        these are the candidates' logits, which differ from log-probabilities by a constant per example.
        Only differences within an example are meaningful then.
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
    """Return the cross-entropy of the gold tokens, summed over each example, float32 [E].

    Args:
        logits: [N, vocabulary size], any float type.
        batch: from `teacher_forcing_batch`. Its weight N makes the loss of a step the mean over tokens.
    """
    return _gather(_token_losses(logits, batch), batch.labels["token_slots"], 0.0).sum(dim=1)


def count_right_tokens(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return how many gold tokens of each example are the model's first choice, float32 [E].

    The arguments are those of `teacher_forcing_loss`.
    """
    right = logits.argmax(dim=1) == batch.labels["target_ids"]
    return _gather(right.float(), batch.labels["token_slots"], 0.0).sum(dim=1)


@dataclass(frozen=True)
class Objective:
    """A loss to minimize, and the batches that it reads.

    Attributes:
        build_batch: function (examples, pad id) -> batch; None if the loss reads generated answers.
        loss: function (logits or answers, batch) -> summed loss of each example, float [examples]. The
            batch's weight is the number of terms in all these sums.
        is_reward: whether the loss is minus a reward that a function of the user's gives.
        num_terms: function (example) -> its part of the batch's weight, which is 1 for a mean over examples.
    """

    build_batch: Callable[[Sequence[EncodedExample], int], MicroBatch] | None
    loss: ObjectiveFunction
    is_reward: bool = False
    num_terms: Callable[[EncodedExample], int] = lambda _: 1

    @property
    def reads_answers(self) -> bool:
        """Whether the loss reads generated answers, not logits."""
        return self.build_batch is None


def training_objective(kind: TaskKind) -> Objective:
    """Return the objective with which MeZO trains a kind of task."""
    if kind == "classification":
        return Objective(candidate_batch, classification_loss)
    return Objective(teacher_forcing_batch, teacher_forcing_loss, num_terms=_num_gold_tokens)


def _num_gold_tokens(example: EncodedExample) -> int:
    return len(example.targets(example.gold))


def f1_loss(answers: Sequence[str], batch: MicroBatch) -> Tensor:
    """Return minus the best token F1 of each answer with its example's references, float64 [E]."""
    pairs = zip(answers, batch.examples, strict=True)
    return torch.tensor([-best_f1(answer, e.references) for answer, e in pairs], dtype=torch.float64)


def reads_answers(function: ObjectiveFunction) -> ObjectiveFunction:
    """Mark an objective that reads generated answers: it gets a list of texts, not logits."""
    function.reads_answers = True  # type: ignore[attr-defined]
    return function


def reward(function: RewardFunction) -> RewardFunction:
    """Mark a function that gives each generated answer a reward. Training maximizes the reward."""
    function.is_reward = True  # type: ignore[attr-defined]
    return function


def _f1_objective(task: Task) -> Objective:
    if task.kind != "generation":
        raise UserError(
            f"train.objective=f1 does not fit task {task.name}",
            got=f"a task scored by {task.metric}",
            expected="a task that generates answers, such as squad or drop",
            fix="set train.objective=task",
        )
    return Objective(build_batch=None, loss=f1_loss)


OBJECTIVES: Registry[Callable[[Task], Objective]] = Registry("objective", "train.objective")
"""Functions task -> objective, by name. They raise UserError if the objective does not fit the task."""
OBJECTIVES.add("task", lambda task: training_objective(task.kind))
OBJECTIVES.add("f1", _f1_objective)


def load_objective(name: str, task: Task) -> Objective:
    """Return the objective that `train.objective` names.

    Args:
        name: a name in OBJECTIVES, or "package.module:function".
        task: the task to train.

    Raises:
        UserError: there is no such objective, or it does not fit the task.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name](task)
    function: Any = import_named("train.objective", name, what="objective")
    if getattr(function, "is_reward", False):
        return Objective(build_batch=None, loss=_loss_of_reward(name, function), is_reward=True)
    reads_texts = bool(getattr(function, "reads_answers", False))
    checked = _checked(name, function, may_overflow=not reads_texts)
    if reads_texts:
        return Objective(build_batch=None, loss=checked)
    own = training_objective(task.kind)

    def build_batch(examples: Sequence[EncodedExample], pad_id: int) -> MicroBatch:
        assert own.build_batch is not None
        # The function returns one loss per example, so the mean is over examples, even if the task's own
        # loss is a mean over tokens.
        return replace(own.build_batch(examples, pad_id), weight=len(examples))

    return Objective(build_batch, checked)


def _checked(name: str, function: ObjectiveFunction, *, may_overflow: bool) -> ObjectiveFunction:
    """Return a user's loss with a check of what it returns.

    Args:
        name: what `train.objective` says.
        function: the loss.
        may_overflow: whether a loss that is not finite is no mistake of the function: the logits may be.
    """

    def loss(outputs: Any, batch: MicroBatch) -> Tensor:  # noqa: ANN401
        losses: object = _call(name, function, outputs, batch)
        expected = (len(batch.examples),)
        if not (isinstance(losses, Tensor) and losses.is_floating_point() and losses.shape == expected):
            shown = f"{losses.dtype} {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
            raise UserError(
                f"train.objective={name} did not return one loss per example",
                got=shown,
                expected=f"a float tensor of shape {expected}",
                fix="return one float per example, in the order of the examples",
            )
        if not may_overflow:
            _check_finite(name, "loss", losses, outputs)
        return losses

    return loss


def _loss_of_reward(name: str, function: RewardFunction) -> ObjectiveFunction:
    """Return minus a user's reward, with a check of what it returns."""

    def loss(answers: Sequence[str], batch: MicroBatch) -> Tensor:
        found = _call(name, function, list(answers), [example.record for example in batch.examples])
        try:
            rewards = torch.as_tensor(found, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError):  # what torch raises for lists that are not of numbers
            rewards = torch.empty(())
        if rewards.shape != (len(answers),):
            raise UserError(
                f"train.objective={name} did not return one reward per answer",
                got=f"{type(found).__name__}: {str(found)[:80]}",
                expected=f"a list of {len(answers)} numbers",
                fix="return one number per answer, in the order of the answers",
            )
        _check_finite(name, "reward", rewards, answers)
        return -rewards

    return loss


def _call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
    """Call a user's function.

    Raises:
        UserError: the function raised an exception. The error names the line.
    """
    try:
        return function(*arguments)
    except LezoError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"train.objective={name} failed",
            got=f"{type(error).__name__}: {error} ({place.filename} line {place.lineno})",
            expected="a value for whatever the model gives",
            fix="correct the function",
        ) from error


def _check_finite(name: str, what: str, values: Tensor, answers: Sequence[str]) -> None:
    wrong = (~values.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise UserError(
            f"train.objective={name} gave a {what} that is not a finite number",
            got=f"{float(values[wrong[0]])} for the answer {answers[wrong[0]][:80]!r}",
            expected="finite numbers",
            fix="correct the function",
        )


def predictions(scores: Tensor) -> list[int]:
    """Return the index of each example's best candidate from scores [E, C]; the first one wins a tie."""
    best: list[int] = scores.argmax(dim=1).tolist()
    return best


def _token_losses(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return minus the log-probability of every target token, float32 [N]."""
    return F.cross_entropy(logits.float(), batch.labels["target_ids"], reduction="none")


def _gather(values: Tensor, slots: Tensor, fill: float) -> Tensor:
    # A gather and a sum are deterministic. index_add on a GPU is not: it adds in a different order each time.
    return torch.where(slots >= 0, values[slots.clamp(min=0)], fill)
