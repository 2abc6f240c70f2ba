"""Scores of predictions: of chosen candidates, generated answers, and tokens in conversations.

A prediction is an index into Example.candidates, a text, or `TokenCounts`, as the kind of the task
has it. Every score is a mean over examples or tokens, 0 to 1. `REWARD` alone has no such score.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lezo_ds.errors import UserError
from lezo_ds.registry import Registry, names_code
from lezo_ds.tasks.base import Example, Task, TokenCounts

_PUNCTUATION = str.maketrans(
    "",
    "",
    string.punctuation
    + "".join(
        mark for mark in map(chr, range(0x80, 0x3000)) if unicodedata.category(mark)[0] == "P"
    ),
)
# An en dash may be a minus. The point of .5 has no digit before it, unlike the last one of "...5".
_OF_NUMBERS = re.compile(r"(?<!\w)[-\u2013](?=\.?\d)|(?<![^\W\d])(?<!\.)\.(?=\d)")
_KEPT = {"-": "\u2212", "\u2013": "\u2212", ".": "\u2396"}  # no punctuation to Unicode
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Han characters, kana, Thai, Lao, Burmese and Khmer, which have no spaces between words.
_UNSPACED = re.compile(
    "([\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff\u3005-\u3007\u3040-\u30ff"
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff])"
)
# The punctuation of Chinese and Japanese.
_WIDE_PUNCTUATION = re.compile(
    "[\u3000-\u3004\u3008-\u303f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]"
)


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


def mean_f1(answers: Sequence[str], examples: Sequence[Example]) -> float:
    """Return the mean F1 of answers, each with the reference that is nearest."""
    pairs = zip(answers, examples, strict=True)
    scores = [best_f1(answer, example.references) for answer, example in pairs]
    return sum(scores) / len(scores)


def macro_f1(predicted: Sequence[int], examples: Sequence[Example]) -> float:
    """Return the mean F1 of the classes that are a label or were predicted.

    This is scikit-learn's f1_score with average="macro".
    """
    labels = [example.label for example in examples if example.label is not None]
    return fmean(score.f1 for score in label_scores(labels, predicted).values())


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


def exact_match(answers: Sequence[str], examples: Sequence[Example]) -> float:
    """Return the fraction of answers that equal a reference once both are normalized."""
    are_right = [
        normalize(answer) in map(normalize, example.references)
        for answer, example in zip(answers, examples, strict=True)
    ]
    return sum(are_right) / len(are_right)


def token_accuracy(predicted: Sequence[TokenCounts], examples: Sequence[Example]) -> float:
    """Return the fraction of all tokens that are the model's first choice."""
    num_right = sum(counts.right for counts in predicted)
    return num_right / sum(counts.total for counts in predicted)


REWARD = "reward"
"""The metric that is the mean of the run's own reward, which may be any number."""

METRICS: Registry[Score | None] = Registry("metric", "data.metric")
METRICS.add("accuracy", accuracy)
METRICS.add("f1", mean_f1)
METRICS.add("macro_f1", macro_f1)
METRICS.add("exact_match", exact_match)
METRICS.add("token_accuracy", token_accuracy)
METRICS.add(REWARD, None)


def find_score(task: Task) -> Score | None:
    """Return the score of a task's metric, or None for `REWARD`.

    Raises:
        UserError: there is no such metric, or it does not fit the kind of task.
    """
    score = METRICS.find(task.metric)
    fitting = (*task.metrics, REWARD)
    if not names_code(task.metric) and task.metric.lower() not in fitting:
        raise UserError(
            f"data.metric={task.metric} does not fit a task of the kind {task.kind}",
            fix=f"set data.metric to {', '.join(fitting)} or package.module:function",
        )
    return score


def best_f1(answer: str, references: Sequence[str]) -> float:
    """Return the F1 of an answer with the reference that is nearest."""
    return max(token_f1(answer, reference) for reference in references)


def token_f1(answer: str, reference: str) -> float:
    """Return the F1 of the words of two normalized texts.

    It is 0 if they have no word in common, even if both are empty. This is the score of SQuAD 1.1
    (Rajpurkar et al. 2016), which MeZO also uses for DROP. In scripts without spaces, each
    character is a word, as in CMRC 2018 (Cui et al. 2019).
    """
    answer_words = _words(answer)
    reference_words = _words(reference)
    num_common = (Counter(answer_words) & Counter(reference_words)).total()
    if num_common == 0:
        return 0.0
    return 2 * num_common / (len(answer_words) + len(reference_words))


def _words(text: str) -> list[str]:
    """Return the words of a normalized text, and each character of a script without spaces."""
    return _UNSPACED.sub(r" \1 ", normalize(text)).split()


def normalize(text: str) -> str:
    """Lower-case, drop punctuation, then articles, and leave single spaces.

    These are the steps of SQuAD's evaluation script (Rajpurkar et al. 2016), in its order. As in
    MLQA's (Lewis et al. 2020), the punctuation of other scripts than ASCII counts, too. Composed
    and decomposed accents are the same. The sign and the point of a number are part of it: neither
    -5 and 5 nor 3.5 and 35 are the same. A text of articles or punctuation alone keeps them.
    """
    lowered = unicodedata.normalize("NFC", text.lower())
    lowered = _OF_NUMBERS.sub(lambda mark: _KEPT[mark[0]], lowered)
    without_punctuation = _WIDE_PUNCTUATION.sub(" ", lowered.translate(_PUNCTUATION))
    words = _ARTICLES.sub(" ", without_punctuation).split()
    # An answer may be the letter A of a choice, or a sign.
    return " ".join(words or without_punctuation.split() or lowered.split())
