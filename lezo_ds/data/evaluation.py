"""Evaluation and prediction: what the scores of a split say of a model.

`Task.score` and `Task.predict` decide what is computed, and a `Scorer` computes it on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from lezo_ds.data.generation import ended_answers, tidy
from lezo_ds.data.metrics import has_labels, load_score, majority_score
from lezo_ds.data.objectives import training_objective
from lezo_ds.data.reader import EncodedSplit, Reader
from lezo_ds.data.scorer import Model, Scorer
from lezo_ds.tasks.base import Example, Prediction, Task
from lezo_ds.tasks.metrics import LabelScore, label_scores

PREDICTED = "predicted"
"""Key of `predict`'s records: the answer, or the label or text of the best candidate."""
PROBABILITY = "probability"
"""Key of `predict`'s records: the probability of the best candidate among the candidates."""
OF_LABEL = f"{PROBABILITY}_"
"""How the keys of the probabilities of all labels begin; the label follows."""


NUM_SAMPLES = 4
"""Number of answers that an evaluation shows."""


@dataclass(frozen=True)
class Sample:
    """What the model wrote after a prompt.

    Attributes:
        index: of the example in its split.
        prompt: what it read.
        answer: what it wrote.
        reward: minus the loss that the objective gives the answer.
        rewards: what each of several rewards gives it; None where it does not apply.
        ended: whether it ended before it had generation.max_new_tokens.
    """

    index: int
    prompt: str
    answer: str
    reward: float
    ended: bool
    rewards: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationResult:
    """The result of scoring a split. It is the same on every rank.

    Attributes:
        loss: mean of the training objective.
        score: the task's metric, 0 to 1 if it is one of ours; or the mean reward, which may be any
            number. It is a finite Python float.
        majority_class: score of always predicting the most frequent label; None if there are no
            classes, or if the metric has no score for it.
        predicted: a prediction for each example.
        by_label: of a classification, the scores of each label; else None.
        samples: the first answers that an objective has judged; empty if none reads answers.
        rewards: the mean of each reward, if the objective has several.
        share_ended: share of these answers, of all examples, that ended before
            generation.max_new_tokens; None without answers.
    """

    loss: float
    score: float
    majority_class: float | None
    predicted: tuple[Prediction, ...]
    by_label: Mapping[str, LabelScore] | None
    samples: tuple[Sample, ...] = ()
    share_ended: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def macro_f1(self) -> float | None:
        """The mean F1 of the labels; None if the task is no classification."""
        if self.by_label is None:
            return None
        return fmean(score.f1 for score in self.by_label.values())


def evaluate(
    engine: Model,
    reader: Reader,
    split: EncodedSplit,
    batch_size: int,
) -> EvaluationResult:
    """Return the loss and the score of a split. A collective.

    Args:
        engine: the model.
        reader: how it reads examples.
        split: the examples to score.
        batch_size: sequences in a forward pass.

    Raises:
        UserError: the user's metric or objective failed.
    """
    scorer = Scorer(engine, reader, split, batch_size)
    task = reader.task
    loss, predicted = task.score(scorer)
    # The task's own loss follows from the scores. Any other needs passes of its own.
    if reader.objective != training_objective(task):
        loss = scorer.objective_loss()
    samples: tuple[Sample, ...] = ()
    share_ended = None
    if reader.objective.reads_answers:
        samples, share_ended = _samples(scorer)
    score = load_score(task)
    by_label = None
    if task.has_classes and has_labels(split.examples):
        by_label = scores_by_label(task, split.examples, predicted)
    return EvaluationResult(
        loss,
        # The metric without a score is the reward, and the loss is minus the mean reward. Adding 0
        # makes 0 of -0.
        score=0.0 - loss if score is None else score(predicted, split.examples),
        majority_class=majority_score(score, split.examples),
        predicted=tuple(predicted),
        by_label=by_label,
        samples=samples,
        share_ended=share_ended,
        rewards=scorer.rewards(),
    )


def _samples(scorer: Scorer) -> tuple[tuple[Sample, ...], float]:
    """Return the first answers of a split, and the share of all that ended in time."""
    reader = scorer.reader
    assert reader.generation is not None
    tokens = scorer.new_tokens
    ended = ended_answers(tokens, reader.generation, reader.tokenizer)
    answers = reader.answers(tokens[:NUM_SAMPLES], as_written=reader.objective.is_reward)
    samples = []
    for number, answer in enumerate(answers):
        example = scorer.split.examples[number]
        loss, *scores = scorer.objective_values[number].tolist()
        judges = reader.objective.rewards
        names = judges.names if judges is not None and len(scores) > 1 else ()
        rewards = {
            name: None if math.isnan(score) else score
            for name, score in zip(names, scores, strict=False)
        }
        reward = 0.0 - loss
        samples.append(
            Sample(example.index, example.prompt, tidy(answer), reward, ended[number], rewards)
        )
    return tuple(samples), sum(ended) / len(ended)


def predict(
    engine: Model,
    reader: Reader,
    split: EncodedSplit,
    batch_size: int,
    *,
    probabilities: bool = False,
    threshold: float = 0.0,
) -> list[dict[str, Any]]:
    """Return for each example what the model makes of it. A collective.

    A record has the key PREDICTED and, for candidates, PROBABILITY: the softmax of the candidates'
    scores, which are mean log-probabilities of tokens.

    Args:
        engine: the model.
        reader: how it reads examples.
        split: the examples.
        batch_size: sequences in a forward pass.
        probabilities: whether a record also has the probability of each label, under OF_LABEL and
            the label.
        threshold: below this probability, PREDICTED is "".
    """
    scorer = Scorer(engine, reader, split, batch_size)
    rows = []
    for predicted in reader.task.predict(scorer, split.examples):
        row = {PREDICTED: predicted.answer}
        if predicted.probability is not None:
            row[PROBABILITY] = round(predicted.probability, 6)
            if predicted.probability < threshold:
                row[PREDICTED] = ""
        if probabilities:
            for label, share in predicted.by_name.items():
                row[f"{OF_LABEL}{label}"] = round(share, 6)
        rows.append(row)
    return rows


def prediction_rows(
    task: Task,
    examples: Sequence[Example],
    predicted: Sequence[Prediction],
) -> list[dict[str, Any]]:
    """Return a JSON record for each example: its index, prompt, right answers and prediction."""
    rows = []
    for example, prediction in zip(examples, predicted, strict=True):
        right = example.references or example.gold_texts
        rows.append(
            {
                "index": example.index,
                "prompt": example.prompt,
                "right": [answer.strip() for answer in right],
                "predicted": task.shown(example, prediction),
            }
        )
    return rows


def scores_by_label(
    task: Task, examples: Sequence[Example], predicted: Sequence[Any]
) -> dict[str, LabelScore]:
    """Return the scores of each label of a task with classes."""
    names = list(map(str, task.names(examples[0])))
    labels = [names[example.label or 0] for example in examples]
    return label_scores(labels, [names[choice] for choice in predicted])
