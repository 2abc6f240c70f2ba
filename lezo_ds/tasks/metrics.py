"""Scores of predictions: of chosen candidates, and of generated answers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lezo_ds.errors import UserError
from lezo_ds.registry import Registry, import_named, names_code
from lezo_ds.tasks.base import Example, TaskKind

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def accuracy(predicted: Sequence[int], examples: Sequence[Example]) -> float:
    """Return the share of examples, 0 to 1, whose predicted candidate is the label or a reference."""
    right = [
        choice == example.label or example.candidates[choice] in example.references
        for choice, example in zip(predicted, examples, strict=True)
    ]
    return sum(right) / len(right)


def mean_f1(answers: Sequence[str], examples: Sequence[Example]) -> float:
    """Return the mean over examples, 0 to 1, of the best token F1 of an answer with its references."""
    scores = [best_f1(answer, example.references) for answer, example in zip(answers, examples, strict=True)]
    return sum(scores) / len(scores)


def macro_f1(predicted: Sequence[int], examples: Sequence[Example]) -> float:
    """Return the mean over classes, 0 to 1, of the F1 of finding the class.

    The classes are those that are the label of an example or were predicted for one. This is the macro
    average of scikit-learn's f1_score.

    >>> labels = [Example("", (" a", " b"), label, 0) for label in (0, 0, 1)]
    >>> macro_f1([0, 1, 1], labels)
    0.6666666666666666
    """
    labels = [example.label for example in examples if example.label is not None]
    num_found, num_labels = Counter(predicted), Counter(labels)
    num_right = Counter(label for choice, label in zip(predicted, labels, strict=True) if choice == label)
    classes = num_found.keys() | num_labels.keys()
    scores = [2 * num_right[name] / (num_found[name] + num_labels[name]) for name in classes]
    return sum(scores) / len(scores)


def exact_match(answers: Sequence[str], examples: Sequence[Example]) -> float:
    """Return the share of answers, 0 to 1, that equal a reference once both are normalized."""
    right = [
        normalize(answer) in map(normalize, example.references)
        for answer, example in zip(answers, examples, strict=True)
    ]
    return sum(right) / len(right)


class TokenCounts(NamedTuple):
    """How well a model predicts the assistant's turns of a conversation, each token after all before it.

    Attributes:
        right: number of tokens that are the model's first choice.
        total: number of tokens, at least 1.
    """

    right: int
    total: int


def token_accuracy(predicted: Sequence[TokenCounts], examples: Sequence[Example]) -> float:
    """Return the share of all tokens of the assistant, 0 to 1, that are the model's first choice."""
    return sum(counts.right for counts in predicted) / sum(counts.total for counts in predicted)


Prediction = int | str | TokenCounts
"""What a model makes of an example: the index of a candidate, a generated answer, or counts of tokens."""

CHOOSING: tuple[TaskKind, ...] = ("classification", "multiple_choice")
"""The kinds of task whose predictions are candidates."""


@dataclass(frozen=True)
class Metric:
    """A score of predictions.

    Attributes:
        title: its name in texts.
        score: function (predictions, examples) -> 0 to 1. A prediction is the index of a candidate, the
            generated answer for a task of the kind "generation", or TokenCounts for one of the kind "chat".
            None for REWARD.
        kinds: the kinds of task that it can score; empty for all.
    """

    title: str
    score: Callable[[Sequence[Any], Sequence[Example]], float] | None
    kinds: tuple[TaskKind, ...] = ()


REWARD = "reward"
"""The metric that is the mean of the run's own reward, which may be any number."""

METRICS: Registry[Metric] = Registry("metric", "data.metric")
"""Metrics by the name that a task gives in `Task.metric`, or a recipe in `data.metric`."""
METRICS.add("accuracy", Metric("accuracy", accuracy, CHOOSING))
METRICS.add("f1", Metric("token F1", mean_f1, ("generation",)))
METRICS.add("macro_f1", Metric("macro-F1", macro_f1, ("classification",)))
METRICS.add("exact_match", Metric("exact match", exact_match, ("generation",)))
METRICS.add("token_accuracy", Metric("token accuracy", token_accuracy, ("chat",)))
METRICS.add(REWARD, Metric("mean reward", None))


def find_metric(name: str, kind: TaskKind) -> Metric:
    """Return a metric for a kind of task.

    Args:
        name: a name in METRICS, or "package.module:function" for a function as in `Metric.score`. Its module
            is imported.
        kind: the kind of task to score.

    Raises:
        UserError: there is no such metric, or it does not fit the kind of task.
    """
    if names_code(name):
        expected = f"{', '.join(METRICS)} or package.module:function"
        return Metric(name, import_named("data.metric", name, what="a metric", expected=expected))
    metric = METRICS.find(name)
    if metric.kinds and kind not in metric.kinds:
        fitting = [other for other, found in METRICS.items() if not found.kinds or kind in found.kinds]
        raise UserError(
            f"data.metric={name} does not fit a task of the kind {kind}",
            got=name,
            expected=f"one of {', '.join(fitting)}, or package.module:function",
            fix=f"set data.metric={fitting[0]}",
        )
    return metric


def majority_class_score(
    examples: Sequence[Example], score: Callable[[Sequence[Any], Sequence[Example]], float] | None
) -> float | None:
    """Return the score of always predicting the most frequent label.

    Args:
        examples: at least one.
        score: as `Metric.score`.

    Returns:
        None if there are no classes, because each example lists its own right answers, if it has any (ReCoRD
        and all generation tasks); or if there is no score of predictions, but a reward.

    >>> examples = [Example("", ("Yes", "No"), label, 0) for label in (1, 0, 1, 1)]
    >>> majority_class_score(examples, accuracy), round(majority_class_score(examples, macro_f1), 3)
    (0.75, 0.429)
    """
    if score is None or any(example.references or example.label is None for example in examples):
        return None
    ((label, _),) = Counter(example.label for example in examples).most_common(1)
    return score([label] * len(examples), examples)


def best_f1(answer: str, references: Sequence[str]) -> float:
    """Return the highest token F1, 0 to 1, of `answer` with any of its references (at least one)."""
    return max(token_f1(answer, reference) for reference in references)


def token_f1(answer: str, reference: str) -> float:
    """Return the F1, 0 to 1, of the words of two normalized texts. Repeated words count repeatedly.

    This is the score of SQuAD 1.1 (Rajpurkar et al. 2016), which MeZO also uses for DROP. The score is 0
    if the texts have no word in common, even if both are empty.

    >>> token_f1("the Eiffel Tower in Paris.", "Eiffel tower")
    0.6666666666666666
    """
    answer_words, reference_words = normalize(answer).split(), normalize(reference).split()
    num_common = (Counter(answer_words) & Counter(reference_words)).total()
    return 2 * num_common / (len(answer_words) + len(reference_words)) if num_common else 0.0


def normalize(text: str) -> str:
    """Lower-case, drop ASCII punctuation, then articles, and leave single spaces (Rajpurkar et al. 2016).

    >>> normalize("The  U.S.,  an  ally")
    'us ally'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
