"""Scores of predictions: of chosen candidates, generated answers, and tokens in conversations.

A prediction is an index into Example.candidates, a text, or `TokenCounts`, as the kind of the task
has it. Every score is a mean over examples or tokens, 0 to 1. `REWARD` alone has no such score.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lezo_ds.data.examples import Example, Prediction, TokenCounts
from lezo_ds.data.tasks import Task
from lezo_ds.errors import UserError
from lezo_ds.registry import Registry, names_code
from lezo_ds.user_code import call_of_user, shown

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")

Score = Callable[[Sequence[Any], Sequence[Example]], float]
"""(predictions, examples) -> score, 0 to 1."""


def accuracy(predicted: Sequence[int], examples: Sequence[Example]) -> float:
    """Return the fraction of examples whose predicted candidate is the label or a reference.

    Candidates of the same text are the same. A candidate that an example lacks is wrong: it may be
    the most frequent one of others.
    """
    are_right = [
        choice < len(example.candidates)
        and example.candidates[choice] in (*example.gold_texts, *example.references)
        for choice, example in zip(predicted, examples, strict=True)
    ]
    return sum(are_right) / len(are_right)


def macro_f1(predicted: Sequence[int], examples: Sequence[Example]) -> float:
    """Return the mean F1 of the classes that are a label or were predicted.

    This is scikit-learn's f1_score with average="macro".
    """
    labels = [example.label for example in examples if example.label is not None]
    return fmean(score.f1 for score in label_scores(labels, predicted).values())


def mean_f1(answers: Sequence[str], examples: Sequence[Example]) -> float:
    """Return the mean F1 of answers, each with the reference that is nearest."""
    pairs = zip(answers, examples, strict=True)
    return fmean(best_f1(answer, example.right_texts) for answer, example in pairs)


def exact_match(answers: Sequence[str], examples: Sequence[Example]) -> float:
    """Return the fraction of answers that equal a reference once both are normalized."""
    return fmean(
        normalize(answer) in map(normalize, example.right_texts)
        for answer, example in zip(answers, examples, strict=True)
    )


def token_accuracy(predicted: Sequence[TokenCounts], examples: Sequence[Example]) -> float:
    """Return the fraction of all tokens that are the model's first choice."""
    del examples
    num_right = sum(counts.right for counts in predicted)
    return num_right / sum(counts.total for counts in predicted)


@dataclass(frozen=True)
class LabelScore:
    """How well one label is predicted.

    Attributes:
        examples: number of examples with this label.
        predicted: number of examples for which it was predicted.
        precision: the fraction of `predicted` that is right, 0 if it was never predicted.
        recall: the fraction of `examples` that is found, 0 if there is none.
        f1: the harmonic mean of both.
    """

    examples: int
    predicted: int
    precision: float
    recall: float
    f1: float


def label_scores(labels: Sequence[Any], predicted: Sequence[Any]) -> dict[Any, LabelScore]:
    """Return the scores of each class that is a label or was predicted, the most frequent first.

    Args:
        labels: the right class of each example.
        predicted: its predicted class.
    """
    num_examples = Counter(labels)
    num_predicted = Counter(predicted)
    pairs = Counter(zip(labels, predicted, strict=True))
    scores = {}
    for name in sorted(num_examples | num_predicted, key=lambda name: -num_examples[name]):
        num_right = pairs[name, name]
        scores[name] = LabelScore(
            examples=num_examples[name],
            predicted=num_predicted[name],
            precision=num_right / max(1, num_predicted[name]),
            recall=num_right / max(1, num_examples[name]),
            f1=2 * num_right / (num_examples[name] + num_predicted[name]),
        )
    return scores


REWARD = "reward"
"""The metric that is the mean of the run's own reward, which may be any number."""

METRICS: Registry[Score | None] = Registry("metric", "data.metric")
METRICS.add("accuracy", accuracy)
METRICS.add("f1", mean_f1)
METRICS.add("macro_f1", macro_f1)
METRICS.add("exact_match", exact_match)
METRICS.add("token_accuracy", token_accuracy)
METRICS.add(REWARD, None)

_MEANS = {"accuracy", "f1", "exact_match"}
"""Metrics that are a mean over examples."""


def load_score(task: Task) -> Score | None:
    """Return the score of a task's metric, or None if the metric is the mean reward.

    The score returns a finite Python float, also if a user's metric returns NumPy's or a tensor. It
    raises a UserError if such a metric fails or returns anything else.

    Raises:
        UserError: there is no such metric, or it does not fit the kind of the task.
    """
    metric = METRICS.find(task.metric)
    fitting = (*task.metrics, REWARD)
    if not names_code(task.metric):
        if task.metric.lower() not in fitting:
            raise UserError(
                f"data.metric={task.metric} does not fit a task of the kind {task.kind}",
                fix=f"set data.metric to {', '.join(fitting)} or package.module:function",
            )
        return metric
    assert metric is not None
    name = f"data.metric={task.metric}"

    def score(predicted: Sequence[Prediction], examples: Sequence[Example]) -> float:
        value = call_of_user(name, metric, list(predicted), examples)
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


def load_score_of_one(task: Task) -> Score | None:
    """Return the score of a task's metric if one example has a score, 0 to 1; else None."""
    name = task.metric.lower()
    return METRICS.find(name) if name in _MEANS else None


def majority_score(score: Score, examples: Sequence[Example]) -> float | None:
    """Return the score of always predicting the most frequent label.

    It is None if the metric fails on such predictions, as a correlation does.
    """
    counts = Counter(example.label for example in examples)
    ((label, _),) = counts.most_common(1)
    try:
        return score([label or 0] * len(examples), examples)
    except UserError:
        return None


def try_metric(task: Task, examples: Sequence[Example]) -> None:
    """Let a user's metric score right answers to some examples, so that it fails before a run.

    Raises:
        UserError: the metric failed, or returned no finite number.
    """
    score = load_score(task)
    if score is not None and names_code(task.metric):
        score(task.tried_predictions(examples), examples)


def best_f1(answer: str, references: Sequence[str]) -> float:
    """Return the F1 of an answer with the reference that is nearest."""
    return max(token_f1(answer, reference) for reference in references)


def token_f1(answer: str, reference: str) -> float:
    """Return the F1 of the words of two normalized texts.

    It is 0 if they have no word in common. This is the score of SQuAD 1.1's evaluation script
    (Rajpurkar et al. 2016), which MeZO also uses for DROP.
    """
    answer_words = normalize(answer).split()
    reference_words = normalize(reference).split()
    num_common = (Counter(answer_words) & Counter(reference_words)).total()
    if num_common == 0:
        return 0.0
    return 2 * num_common / (len(answer_words) + len(reference_words))


def normalize(text: str) -> str:
    """Lower-case, drop ASCII punctuation, then articles, and leave single spaces.

    These are the steps of SQuAD's evaluation script (Rajpurkar et al. 2016), in its order.
    """
    without_punctuation = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())
