"""A fifth kind of task as a user writes one, in a file of their own: the answer is a number."""

from dataclasses import dataclass
from statistics import fmean

import torch

from lezo_ds.data.batches import candidate_batch
from lezo_ds.data.examples import Example, Predicted
from lezo_ds.data.objectives import Objective, candidate_scores
from lezo_ds.data.tasks import Task

STARS = (1, 2, 3, 4, 5)


def squared_error(logits, batch):
    """Return the squared error of the expected number of stars, [examples]."""
    shares = candidate_scores(logits, batch).softmax(dim=1)
    expected = shares @ torch.tensor(STARS, dtype=shares.dtype)
    return (expected - 1 - batch.labels["label"]) ** 2


SQUARED_ERROR = Objective(candidate_batch, squared_error)


def closeness(predicted, examples):
    """Return 1 minus the mean error as a share of the largest one."""
    pairs = zip(predicted, examples, strict=True)
    return 1 - fmean(abs(stars - STARS[e.label]) for stars, e in pairs) / 4


@dataclass(frozen=True, kw_only=True)
class Rating(Task):
    """Reviews with a number of stars, which the model estimates by a mean."""

    kind = "rating"
    loss = "own_kind:SQUARED_ERROR"

    name: str = "rating"
    metric: str = "own_kind:closeness"
    answer_fields: tuple[str, ...] = ("stars",)

    def build_example(self, record):
        stars = record["stars"] if record["stars"] in STARS else None
        label = None if stars is None else STARS.index(stars)
        return Example(f"{record['text']} Stars:", tuple(f" {star}" for star in STARS), label)

    def _expected(self, scorer):
        shares = scorer.choice_probabilities()
        return [sum(s * share for s, share in zip(STARS, each, strict=True)) for each in shares]

    def score(self, scorer):
        predicted = self._expected(scorer)
        right = [STARS[encoded.gold] for encoded in scorer.encoded]
        errors = [(a - b) ** 2 for a, b in zip(predicted, right, strict=True)]
        return fmean(errors), predicted

    def predict(self, scorer, examples):
        return [Predicted(round(stars, 2)) for stars in self._expected(scorer)]

    def tried_predictions(self, examples):
        return [float(STARS[example.label]) for example in examples]


RATING = Rating(fields={"text": str, "stars": int})
