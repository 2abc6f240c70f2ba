"""The score of a split, by a metric that may be a user's function.

Such a function is called with care, because it runs after minutes or hours of scoring: it must
return a finite number, and what it raises becomes one line. It is also tried before weights are
loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lezo_ds.data.objectives import TRIED_ANSWERS, call_of_user
from lezo_ds.errors import UserError, cut
from lezo_ds.registry import names_code
from lezo_ds.tasks import Task
from lezo_ds.tasks.base import Example
from lezo_ds.tasks.metrics import (
    Prediction,
    Score,
    TokenCounts,
    find_score,
    majority_class_score,
)

_FEW = 8
"""Examples that a metric is tried on. A metric may be slow, so it gets all of them only if it
fails."""


def load_score(task: Task) -> Score | None:
    """Return the score of a task's metric, or None if the metric is the mean reward.

    The score returns a finite Python float, also if the metric returns NumPy's or a tensor. It
    raises a UserError if the metric fails or returns anything else.

    Raises:
        UserError: there is no such metric, or it does not fit the kind of the task.
    """
    metric = find_score(task.metric, task.kind)
    if metric is None:
        return None
    name = f"data.metric={task.metric}"

    def score(predicted: Sequence[Prediction], examples: Sequence[Example]) -> float:
        value = call_of_user(name, metric, predicted, examples)
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not math.isfinite(number):
            message = f"{name} returned {cut(repr(value), 80)}, not a finite number"
            raise UserError(message, fix="correct the function, which returns the score as a float")
        return number

    return score


def majority_score(score: Score | None, examples: Sequence[Example]) -> float | None:
    """Return the score of always predicting the most frequent label.

    It is None if there are no classes, or if the metric fails on such predictions, as a correlation
    does.
    """
    try:
        return majority_class_score(examples, score)
    except UserError:
        return None


def try_metric(task: Task, examples: Sequence[Example]) -> None:
    """Let a user's metric score right answers to a few examples, so that it fails before a run.

    Raises:
        UserError: the metric failed, or returned no finite number.
    """
    score = load_score(task)
    if score is None or not names_code(task.metric):
        return
    predicted = [_right_prediction(task, example) for example in examples]
    if task.kind == "generation":
        predicted[0] = ""  # models write empty answers, too
    try:
        score(predicted[:_FEW], examples[:_FEW])
    except UserError:
        # A few examples may be of one class, for which some metrics have no score.
        score(predicted, examples)


def _right_prediction(task: Task, example: Example) -> Prediction:
    if task.kind == "chat":
        return TokenCounts(right=1, total=1)
    if task.kind == "generation":
        answers = (*example.references, *example.gold_texts, *TRIED_ANSWERS[1:])
        return answers[0].strip()
    return example.label or 0
