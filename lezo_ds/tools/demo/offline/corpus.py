"""Generated film reviews: a labeled data set in SST-2's schema, and texts to pre-train a small model on.

A review consists of clauses that praise or blame, such as "the plot is not very dull". Conjunctions decide
which clause counts. "and" adds a clause of the same opinion. In a contrast ("A , but B", "although A , B",
"B , although A", "despite the dull plot , B"), the main clause B counts. A neutral opening may come first.

Every function takes a `random.Random` and is pure otherwise. Single spaces separate the words. In a pair of
word lists, the negative words (label 0) come first and the positive words (label 1) second.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypedDict


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LABEL_WORDS = ("terrible", "great")
"""The verdicts for label 0 and label 1."""

PROMPT_TAIL = "It was"
"""The words between the sentence and the verdict in SST-2's prompt (Malladi et al. 2023)."""

ADJECTIVES = (
    _words(
        "terrible boring dull clumsy tedious weak stale lazy bland messy hollow shallow "
        "grim lifeless tired pointless cheap silly predictable dreadful forced noisy"
    ),
    _words(
        "great wonderful superb charming moving funny clever warm brilliant fresh delightful gripping "
        "sharp tender lively graceful rich witty thoughtful beautiful smart heartfelt"
    ),
)
VERBS = (
    _words("bores drags fails stumbles sinks disappoints"),
    _words("delights shines soars sparkles succeeds triumphs"),
)
FEELINGS = (_words("hated disliked regretted loathed"), _words("loved enjoyed admired liked"))

DETERMINERS = _words("the this its their")
NEUTRAL_ADJECTIVES = _words("long short second final quiet loud modern early")
ASPECTS = _words(
    "film movie story plot script cast acting ending score dialogue pacing director "
    "scene hero villain music camera humour romance drama photography editing"
)
LINKS = _words("is was feels seems looks remains")
INTENSIFIERS = _words("really quite rather truly simply very deeply so")
VIEWERS = _words("i we critics audiences children")
ADJECTIVE_NEGATORS = _words("not never hardly")
VERB_NEGATORS = _words("never hardly")
CONTRASTS = _words("but yet")
CONCESSIONS = _words("although though while")
OPENINGS = (
    "set in paris",
    "set in rome",
    "set in london",
    "set in tokyo",
    "at two hours",
    "from the first minute",
    "as a sequel",
    "in the end",
    "for once",
)

NEGATION_SHARE = 0.25
"""Share of the clauses with a negation, among the kinds of clause that can have one."""

POSITIVE_SHARE = 0.48
"""Share of label 1 in the data set, so that the majority class scores 0.52."""


class Review(TypedDict):
    """One line of the data set, in the schema of GLUE's SST-2: label 0 is negative, 1 positive."""

    sentence: str
    label: int
    idx: int


@dataclass(frozen=True)
class Lesson:
    """A part of the pre-training texts.

    Attributes:
        share: its share of all texts.
        plain: whether its reviews are single clauses without negation.
        verdict_share: share of its reviews that end with a verdict.
        positive_verdict_chance: chance of a positive verdict after a negative and after a positive review.
    """

    share: float
    plain: bool
    verdict_share: float
    positive_verdict_chance: tuple[float, float]


LESSONS = (
    Lesson(share=0.25, plain=True, verdict_share=1.0, positive_verdict_chance=(0.0, 1.0)),
    Lesson(share=0.5, plain=False, verdict_share=1.0, positive_verdict_chance=(0.0, 1.0)),
    Lesson(share=0.25, plain=False, verdict_share=0.75, positive_verdict_chance=(0.03, 0.4)),
)
"""From easy to hard, because a small model learns to read far later if it gets everything at once.

The verdicts of the last lesson come from readers who seldom praise. A model that has learned them still tells
good from bad, but it almost always answers "terrible". A large language model that is asked without examples
has a similar bias.
"""


def vocabulary() -> tuple[str, ...]:
    """Return every word the corpus can contain, sorted, without special tokens."""
    lists = [*ADJECTIVES, *VERBS, *FEELINGS, DETERMINERS, NEUTRAL_ADJECTIVES, ASPECTS, LINKS, INTENSIFIERS]
    lists += [VIEWERS, ADJECTIVE_NEGATORS, VERB_NEGATORS, CONTRASTS, CONCESSIONS, OPENINGS]
    lists += [(PROMPT_TAIL, "what a", "and", "despite", ", .")]
    return tuple(sorted({word for phrases in lists for phrase in phrases for word in phrase.split()}))


def _maybe(rng: random.Random, chance: float, words: tuple[str, ...]) -> str:
    return f"{rng.choice(words)} " if rng.random() < chance else ""


def _subject(rng: random.Random) -> str:
    return f"{rng.choice(DETERMINERS)} {_maybe(rng, 0.2, NEUTRAL_ADJECTIVES)}{rng.choice(ASPECTS)}"


def _description(rng: random.Random, positive: bool) -> str:
    return f"{_maybe(rng, 0.4, INTENSIFIERS)}{rng.choice(ADJECTIVES[positive])}"


def clause(rng: random.Random, positive: bool, plain: bool = False) -> str:
    """Return a clause of 3 to 7 words that praises (`positive`) or blames.

    If it is not `plain`, it may do so by a negation.
    """
    kind = rng.choices(("exclaim", "describe", "judge", "feel"), weights=(1, 5, 2, 2))[0]
    if kind == "exclaim":
        return f"what a {_description(rng, positive)} {rng.choice(ASPECTS)}"
    negated = not plain and rng.random() < NEGATION_SHARE
    says_positive = positive != negated
    if kind == "describe":
        negator = _maybe(rng, negated, ADJECTIVE_NEGATORS)
        return f"{_subject(rng)} {rng.choice(LINKS)} {negator}{_description(rng, says_positive)}"
    negator = _maybe(rng, negated, VERB_NEGATORS)
    if kind == "judge":
        return f"{_subject(rng)} {negator}{rng.choice(VERBS[says_positive])}"
    feeling = rng.choice(FEELINGS[says_positive])
    return f"{rng.choice(VIEWERS)} {negator}{feeling} {_subject(rng)}"


def review(rng: random.Random, positive: bool) -> str:
    """Return a review of 4 to 22 words that praises (`positive`) or blames. It ends with " ."."""
    main = clause(rng, positive)
    kinds = ("single", "and", "contrast", "concession first", "concession last", "despite")
    kind = rng.choices(kinds, weights=(40, 20, 15, 10, 8, 7))[0]
    if kind == "and":
        main = f"{main} and {clause(rng, positive)}"
    elif kind == "contrast":
        main = f"{clause(rng, not positive)} , {rng.choice(CONTRASTS)} {main}"
    elif kind == "concession first":
        main = f"{rng.choice(CONCESSIONS)} {clause(rng, not positive)} , {main}"
    elif kind == "concession last":
        main = f"{main} , {rng.choice(CONCESSIONS)} {clause(rng, not positive)}"
    elif kind == "despite":
        main = f"despite the {_description(rng, not positive)} {rng.choice(ASPECTS)} , {main}"
    opening = f"{rng.choice(OPENINGS)} , " if rng.random() < 0.15 else ""
    return f"{opening}{main} ."


def labelled_reviews(rng: random.Random, num_reviews: int, excluded: Collection[str] = ()) -> list[Review]:
    """Return different reviews, none of which is in `excluded`. The share POSITIVE_SHARE has label 1."""
    num_positive = round(POSITIVE_SHARE * num_reviews)
    labels = [1] * num_positive + [0] * (num_reviews - num_positive)
    rng.shuffle(labels)
    seen = set(excluded)
    reviews: list[Review] = []
    while len(reviews) < num_reviews:
        label = labels[len(reviews)]
        sentence = review(rng, positive=bool(label))
        if sentence not in seen:
            seen.add(sentence)
            reviews.append({"sentence": sentence, "label": label, "idx": len(reviews)})
    return reviews


def pretraining_texts(rng: random.Random, num_texts: int, excluded: Collection[str] = ()) -> list[str]:
    """Return reviews, lesson after lesson, none of which is in `excluded`. Most end with a verdict.

    An example is "the plot is not dull . It was great".
    """
    texts: list[str] = []
    taught = 0.0
    for lesson in LESSONS:
        taught += lesson.share
        texts += [_lesson_text(rng, lesson, excluded) for _ in range(round(taught * num_texts) - len(texts))]
    return texts


def _lesson_text(rng: random.Random, lesson: Lesson, excluded: Collection[str]) -> str:
    positive = rng.random() < 0.5
    text = f"{clause(rng, positive, plain=True)} ." if lesson.plain else review(rng, positive)
    if text in excluded:
        return _lesson_text(rng, lesson, excluded)
    if rng.random() >= lesson.verdict_share:
        return text
    says_positive = rng.random() < lesson.positive_verdict_chance[positive]
    return f"{text} {PROMPT_TAIL} {LABEL_WORDS[says_positive]}"
