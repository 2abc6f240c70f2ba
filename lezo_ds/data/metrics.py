"""The score of a split, by a metric that may be a user's function.

Such a function is called with care, because it runs after minutes or hours of scoring: it must
return a finite number, and what it raises becomes one line. It is also tried before weights are
loaded.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence

from lezo_ds.errors import UserError
from lezo_ds.registry import names_code
from lezo_ds.tasks.base import Example, Prediction, Task
from lezo_ds.tasks.metrics import Score, find_score
from lezo_ds.user_code import call_of_user, shown


def load_score(task: Task) -> Score | None:
    """Return the score of a task's metric, or None if the metric is the mean reward.

    The score returns a finite Python float, also if the metric returns NumPy's or a tensor. It
    raises a UserError if the metric fails or returns anything else.

    Raises:
        UserError: there is no such metric, or it does not fit the kind of the task.
    """
    metric = find_score(task)
    if metric is None:
        return None
    name = f"data.metric={task.metric}"

    def score(predicted: Sequence[Prediction], examples: Sequence[Example]) -> float:
        # A copy: what the function changes must not reach the next evaluation.
        value = call_of_user(name, metric, predicted, copy.deepcopy(examples))
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise UserError(
                f"{name} returned {shown(value)}, not a finite number",
                fix="correct the function, which returns the score as a float",
            )
        return number

    return score


def has_labels(examples: Sequence[Example]) -> bool:
    """Return whether each example has one right candidate."""
    return all(example.label is not None and not example.references for example in examples)


def majority_score(score: Score | None, examples: Sequence[Example]) -> float | None:
    """Return the score of always predicting the most frequent label.

    It is None if there are no classes, because examples list their own right answers; if there is
    no score of predictions; or if the metric fails on such predictions, as a correlation does.
    """
    if score is None or not has_labels(examples):
        return None
    ((label, _),) = Counter(example.label for example in examples).most_common(1)
    try:
        return score([label or 0] * len(examples), examples)
    except UserError:
        return None


def try_metric(task: Task, examples: Sequence[Example]) -> None:
    """Let a user's metric score right answers to all examples, so that it fails before a run.

    A few examples may be of one class, for which some metrics have no score.

    Raises:
        UserError: the metric failed, or returned no finite number.
    """
    score = load_score(task)
    if score is None or not names_code(task.metric):
        return
    score(task.tried_predictions(examples), examples)
