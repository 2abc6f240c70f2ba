"""What a prediction is worth: accuracy of chosen candidates, token F1 of generated answers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from lezo_ds.tasks.base import Example

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def accuracy(predicted: Sequence[int], examples: Sequence[Example]) -> float:
    """Share of examples, 0 to 1, whose predicted candidate is the labelled one or among the references."""
    right = [
        choice == example.label or example.candidates[choice] in example.references
        for choice, example in zip(predicted, examples, strict=True)
    ]
    return sum(right) / len(right)


def majority_class_rate(examples: Sequence[Example]) -> float | None:
    """Accuracy, 0 to 1, of always answering the most frequent label: what any score must beat.

    Returns:
        None where there are no classes: every example has a list of right answers of its own
        (ReCoRD, and all tasks that generate).

    >>> majority_class_rate([Example("", ("Yes", "No"), label, 0) for label in (1, 0, 1, 1)])
    0.75
    """
    if any(example.references for example in examples):
        return None
    return max(Counter(example.label for example in examples).values()) / len(examples)


def mean_f1(answers: Sequence[str], examples: Sequence[Example]) -> float:
    """Mean over examples, 0 to 1, of the best token F1 that each answer has with one of its references."""
    scores = [best_f1(answer, example.references) for answer, example in zip(answers, examples, strict=True)]
    return sum(scores) / len(scores)


def best_f1(answer: str, references: Sequence[str]) -> float:
    """Token F1, 0 to 1, of `answer` with the reference it is nearest to; of those there is at least one."""
    return max(token_f1(answer, reference) for reference in references)


def token_f1(answer: str, reference: str) -> float:
    """F1, 0 to 1, of the words of two normalised texts, each counted as often as it occurs.

    As SQuAD 1.1 scores (Rajpurkar et al. 2016), and MeZO for DROP too: without a word in common it
    is 0, also where both are empty.

    >>> token_f1("the Eiffel Tower in Paris.", "Eiffel tower")
    0.6666666666666666
    """
    answer_words, reference_words = normalise(answer).split(), normalise(reference).split()
    num_common = (Counter(answer_words) & Counter(reference_words)).total()
    return 2 * num_common / (len(answer_words) + len(reference_words)) if num_common else 0.0


def normalise(text: str) -> str:
    """Lower-case, drop ASCII punctuation, then articles, and leave single spaces (Rajpurkar et al. 2016).

    >>> normalise("The  U.S.,  an  ally")
    'us ally'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
