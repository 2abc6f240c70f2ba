"""The reward of keywords.yaml: exactly three different words of the review, separated by commas."""

import re
from collections.abc import Mapping, Sequence

from lezo_ds.data.rewards import reward
from lezo_ds.data.tasks import Example

WORD = re.compile(r"[a-z]+(?:['-][a-z]+)*")


def num_mistakes(answer: str, record: Mapping[str, str]) -> int:
    """Count parts too many or too few, and those that are no word of the review or come twice."""
    parts = [part.strip().lower() for part in answer.split(",")]
    words = set(WORD.findall(record["sentence"].lower()))
    return abs(len(parts) - 3) + len(parts) - len(words.intersection(parts))


@reward
def three_words(answers: Sequence[str], records: Sequence[Mapping[str, str]]) -> list[float]:
    """Give 1 to an answer in the required form, and less the more mistakes an answer has."""
    return [
        1 / (1 + num_mistakes(answer, record))
        for answer, record in zip(answers, records, strict=True)
    ]


def share_in_form(answers: Sequence[str], examples: Sequence[Example]) -> float:
    """Return the share of answers, 0 to 1, without a mistake: a metric."""
    right = [
        num_mistakes(answer, e.record) == 0 for answer, e in zip(answers, examples, strict=True)
    ]
    return sum(right) / len(right)
