"""Scores of predictions: of chosen candidates, and of generated answers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

from lezo_ds.errors import UserError
from lezo_ds.registry import Registry, names_code
from lezo_ds.tasks.base import Example, TaskKind

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class TokenCounts(NamedTuple):
    """Of the tokens in the assistant's turns of a conversation, how many are the model's first choice."""

    right: int
    total: int


Prediction = int | str | TokenCounts
"""What a model makes of an example: the index of a candidate, a generated answer, or counts of tokens."""

Score = Callable[[Sequence[Any], Sequence[Example]], float]
"""(predictions, examples) -> score, 0 to 1."""


def accuracy(predicted: Sequence[int], examples: Sequence[Example]) -> float:
    """Return the share of examples whose predicted candidate is the label or a reference."""
    pairs = zip(predicted, examples, strict=True)
    num_right = sum(
        choice == e.label or e.candidates[choice] in e.references for choice, e in pairs
    )
    return num_right / len(examples)


def mean_f1(answers: Sequence[str], examples: Sequence[Example]) -> float:
    pairs = zip(answers, examples, strict=True)
    return sum(best_f1(answer, e.references) for answer, e in pairs) / len(examples)


def macro_f1(predicted: Sequence[int], examples: Sequence[Example]) -> float:
    """Return the mean F1 of the classes that are a label or were predicted, as scikit-learn's f1_score."""
    labels = [example.label for example in examples if example.label is not None]
    num_predicted, num_labels = Counter(predicted), Counter(labels)
    num_right = Counter(
        label for choice, label in zip(predicted, labels, strict=True) if choice == label
    )
    classes = num_predicted.keys() | num_labels.keys()
    scores = [2 * num_right[name] / (num_predicted[name] + num_labels[name]) for name in classes]
    return sum(scores) / len(scores)


def exact_match(answers: Sequence[str], examples: Sequence[Example]) -> float:
    """Return the share of answers that equal a reference once both are normalized."""
    pairs = zip(answers, examples, strict=True)
    return sum(normalize(answer) in map(normalize, e.references) for answer, e in pairs) / len(
        examples
    )


def token_accuracy(predicted: Sequence[TokenCounts], examples: Sequence[Example]) -> float:
    return sum(counts.right for counts in predicted) / sum(counts.total for counts in predicted)


class Metric(NamedTuple):
    """A score of predictions, and the kinds of task that it can score."""

    score: Score | None
    kinds: tuple[TaskKind, ...]


REWARD = "reward"
"""The metric that is the mean of the run's own reward, which may be any number. It scores no predictions."""

METRICS: Registry[Metric] = Registry("metric", "data.metric")
METRICS.add("accuracy", Metric(accuracy, ("classification", "multiple_choice")))
METRICS.add("f1", Metric(mean_f1, ("generation",)))
METRICS.add("macro_f1", Metric(macro_f1, ("classification",)))
METRICS.add("exact_match", Metric(exact_match, ("generation",)))
METRICS.add("token_accuracy", Metric(token_accuracy, ("chat",)))
METRICS.add(REWARD, Metric(None, get_args(TaskKind)))


def find_score(name: str, kind: TaskKind) -> Score | None:
    """Return the score of a metric, or the `Score` that package.module:function names; None for REWARD."""
    metric: Any = METRICS.find(name)
    if names_code(name):
        return metric  # type: ignore[no-any-return]
    if kind not in metric.kinds:
        fitting = ", ".join(other for other, entry in METRICS.items() if kind in entry.kinds)
        fix = f"set data.metric to {fitting} or package.module:function"
        raise UserError(f"data.metric={name} does not fit a task of the kind {kind}", fix=fix)
    score: Score | None = metric.score
    return score


def majority_class_score(examples: Sequence[Example], score: Score | None) -> float | None:
    """Return the score of always predicting the most frequent label.

    None if there are no classes, because examples list their own right answers, or no score of predictions.
    """
    if score is None or any(example.references or example.label is None for example in examples):
        return None
    ((label, _),) = Counter(example.label for example in examples).most_common(1)
    return score([label] * len(examples), examples)


def best_f1(answer: str, references: Sequence[str]) -> float:
    return max(token_f1(answer, reference) for reference in references)


def token_f1(answer: str, reference: str) -> float:
    """Return the F1 of the words of two normalized texts; 0 if they have no word in common, even if empty.

    This is the score of SQuAD 1.1 (Rajpurkar et al. 2016), which MeZO also uses for DROP.
    """
    answer_words, reference_words = normalize(answer).split(), normalize(reference).split()
    num_common = (Counter(answer_words) & Counter(reference_words)).total()
    return 2 * num_common / (len(answer_words) + len(reference_words)) if num_common else 0.0


def normalize(text: str) -> str:
    """Lower-case, drop ASCII punctuation, then articles, and leave single spaces (Rajpurkar et al. 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
