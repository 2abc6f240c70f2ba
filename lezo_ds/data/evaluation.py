"""Evaluation: scores examples on all ranks, with the same result for any number of ranks.

Inputs are sorted by length, so that batches have little padding, and cut into batches before they
are given to ranks: the batches do not depend on the number of ranks. Rank r of R runs the batches
r, r + R, ... Each value is computed by one rank and is 0 on all others, so one sum gives all ranks
all values:

    batches          0    1    2    3    4          a forward pass is a collective, so a rank
    rank 0 runs      0         2         4          without a batch left runs the last one
    rank 1 runs           1         3   (4)         again, and drops what it gives

Ranks that split the weights by tensor parallelism run the same batches, and the first one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from lezo_ds import distributed
from lezo_ds.data.batches import all_candidates, teacher_forcing_batch, token_batch
from lezo_ds.data.encoding import TokenIds
from lezo_ds.data.generation import ended_answers
from lezo_ds.data.metrics import has_classes, load_score, majority_score
from lezo_ds.data.objectives import count_right_tokens, teacher_forcing_loss, training_objective
from lezo_ds.data.task_data import EncodedSplit, TaskData
from lezo_ds.forward.batch import MicroBatch, to_device
from lezo_ds.tasks import Task
from lezo_ds.tasks.base import Example
from lezo_ds.tasks.metrics import LabelScore, Prediction, TokenCounts, label_scores

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
        ended: whether it ended before it had generation.max_new_tokens.
    """

    index: int
    prompt: str
    answer: str
    reward: float
    ended: bool


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

    @property
    def macro_f1(self) -> float | None:
        """The mean F1 of the labels; None if the task is no classification."""
        if self.by_label is None:
            return None
        return fmean(score.f1 for score in self.by_label.values())


class Model(Protocol):
    """The part of an engine that evaluation uses."""

    @property
    def tensor_parallel(self) -> int:
        """Number of ranks that run the same batches."""

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the logits, or the new tokens, that a micro-batch selects. A collective."""


def evaluate(
    engine: Model,
    data: TaskData,
    split: EncodedSplit,
    batch_size: int,
) -> EvaluationResult:
    """Return the loss and the score of a split. A collective.

    Args:
        engine: the model.
        data: the data of the run.
        split: the examples to score.
        batch_size: sequences in a forward pass.

    Raises:
        UserError: the user's metric or objective failed.
    """
    evaluation = _Evaluation(engine, data, split, batch_size)
    tokens = evaluation.new_tokens() if split.prompts else None
    loss, predicted = evaluation.loss_and_predictions(tokens)
    samples: tuple[Sample, ...] = ()
    share_ended = None
    if tokens is not None and data.objective.reads_answers:
        samples, share_ended = evaluation.samples(tokens)
    score = load_score(data.task)
    by_label = None
    if data.task.kind == "classification" and has_classes(split.examples):
        by_label = scores_by_label(data.task, split.examples, predicted)
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
    )


def predict(
    engine: Model,
    data: TaskData,
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
        data: the data of the run.
        split: the examples.
        batch_size: sequences in a forward pass.
        probabilities: whether a record also has the probability of each label, under OF_LABEL and
            the label.
        threshold: below this probability, PREDICTED is "".
    """
    evaluation = _Evaluation(engine, data, split, batch_size)
    if split.prompts:
        return [{PREDICTED: answer} for answer in data.answers(evaluation.new_tokens())]
    scores = evaluation.candidate_scores(evaluation.log_probabilities())
    choices: list[int] = scores.argmax(dim=1).tolist()
    shares: list[list[float]] = scores.softmax(dim=1).tolist()
    rows = []
    for example, choice, of_example in zip(split.examples, choices, shares, strict=True):
        labels = label_names(data.task, example)
        row = {PREDICTED: labels[choice], PROBABILITY: round(of_example[choice], 6)}
        if of_example[choice] < threshold:
            row[PREDICTED] = ""
        if probabilities:
            for label, share in zip(labels, of_example, strict=True):
                row[f"{OF_LABEL}{label}"] = round(share, 6)
        rows.append(row)
    return rows


def answer_text(example: Example, predicted: Prediction) -> str:
    """Return a prediction as a reader sees it."""
    if isinstance(predicted, TokenCounts):
        return f"{predicted.right} of {predicted.total} tokens"
    if isinstance(predicted, str):
        return predicted.strip()
    return example.candidates[predicted].strip()


def prediction_rows(
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
                "predicted": answer_text(example, prediction),
            }
        )
    return rows


def label_names(task: Task, example: Example) -> Sequence[Any]:
    """Return what the records hold for the candidates of an example, or else their texts."""
    return task.labels or [text.strip() for text in example.candidates]


def scores_by_label(
    task: Task, examples: Sequence[Example], predicted: Sequence[Any]
) -> dict[str, LabelScore]:
    """Return the scores of each label of a classification."""
    names = list(map(str, label_names(task, examples[0])))
    labels = [names[example.label or 0] for example in examples]
    return label_scores(labels, [names[choice] for choice in predicted])


@dataclass(frozen=True)
class _Evaluation:
    """One evaluation. The fields are the arguments of `evaluate`, and scoring is a collective."""

    engine: Model
    data: TaskData
    split: EncodedSplit
    batch_size: int

    def loss_and_predictions(self, tokens: Tensor | None) -> tuple[float, Sequence[Prediction]]:
        """Return the mean loss, and a prediction for each example. `tokens`: the answers' own."""
        data = self.data
        kind = data.task.kind
        if kind == "generation":
            assert tokens is not None
            return self._objective_loss(tokens), data.answers(tokens)
        predicted: Sequence[Prediction]
        if kind == "chat":
            losses, predicted = self._token_scores()
            loss = self._mean(losses)
        else:
            sums = self.log_probabilities()
            scores = self.candidate_scores(sums)
            predicted = scores.argmax(dim=1).tolist()  # the first one wins a tie
            golds = [example.gold for example in self.split.encoded]
            if kind == "classification":
                loss = F.cross_entropy(scores, torch.tensor(golds)).item()
            else:
                right = [total[gold] for total, gold in zip(sums, golds, strict=True)]
                loss = self._mean(-torch.stack(right))
        # The task's own loss follows from the scores. Any other needs passes of its own.
        if data.objective != training_objective(kind):
            loss = self._objective_loss(tokens)
        return loss, predicted

    def samples(self, tokens: Tensor) -> tuple[tuple[Sample, ...], float]:
        """Return the first answers in new tokens, and the share of all that ended in time."""
        data = self.data
        assert data.generation is not None
        ended = ended_answers(tokens, data.generation, data.tokenizer)
        shown = range(min(NUM_SAMPLES, len(tokens)))
        losses = data.loss(tokens[: len(shown)], data.objective_batch(self.split, shown))
        answers = data.answers(tokens[: len(shown)], with_thoughts=data.objective.is_reward)
        samples = []
        for number, answer, loss in zip(shown, answers, losses.tolist(), strict=True):
            example = self.split.examples[number]
            reward = 0.0 - loss
            samples.append(Sample(example.index, example.prompt, answer, reward, ended[number]))
        return tuple(samples), sum(ended) / len(ended)

    def candidate_scores(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the mean log-probability of each candidate's tokens.

        It is float64 [examples, most candidates], filled with -inf. `sums` are those of
        `log_probabilities`.
        """
        means = []
        for total, example in zip(sums, self.split.encoded, strict=True):
            means.append(total / torch.tensor(example.option_lengths))
        return pad_sequence(means, batch_first=True, padding_value=float("-inf"))

    def _mean(self, losses: Tensor) -> float:
        """Return the mean of the objective from its sum over each example, float64 [examples].

        If a batch size is set for the loss, it is the mean over batches, each of which counts by
        its number of examples, as transformers' Trainer averages.
        """
        count = self.data.objective.num_terms
        num_terms = torch.tensor([count(example) for example in self.split.encoded])
        size = self.data.loss_batch
        if size is None:
            return float(losses.sum() / num_terms.sum())
        total = 0.0
        for batch, batch_terms in zip(
            torch.split(losses, size), torch.split(num_terms, size), strict=True
        ):
            total += len(batch) * float(batch.sum() / batch_terms.sum())
        return total / len(losses)

    def log_probabilities(self) -> list[Tensor]:
        """Return the summed log-probability of the tokens of each candidate.

        The result has float64 [candidates] for each example.
        """
        candidates = all_candidates(self.split.encoded)

        def score(items: Sequence[int]) -> Tensor:
            chosen = [candidates[item] for item in items]
            batch = token_batch(chosen, self.data.tokenizer.pad_id, share_rows=True)
            batch, logits = self._forward(batch)
            return -teacher_forcing_loss(logits, batch).unsqueeze(1)

        sequences = [example.sequences[number] for example, number in candidates]
        sums = self._spread(_rows_by_context(sequences), 1, score).squeeze(1)
        num_candidates = [len(example.sequences) for example in self.split.encoded]
        return list(torch.split(sums, num_candidates))

    def _token_scores(self) -> tuple[Tensor, list[TokenCounts]]:
        """Return the summed loss of each conversation, float64 [examples], and its right tokens."""
        encoded = self.split.encoded

        def score(items: Sequence[int]) -> Tensor:
            examples = [encoded[item] for item in items]
            batch = teacher_forcing_batch(examples, self.data.tokenizer.pad_id).with_logits()
            batch, logits = self._forward(batch)
            return torch.stack(
                [teacher_forcing_loss(logits, batch), count_right_tokens(logits, batch)], dim=1
            )

        rows = _rows_by_length([example.num_tokens for example in encoded])
        losses, right = self._spread(rows, 2, score).T
        return losses, [
            TokenCounts(int(num_right), example.num_gold_tokens())
            for num_right, example in zip(right.tolist(), encoded, strict=True)
        ]

    def new_tokens(self) -> Tensor:
        """Return what the model writes after each prompt, int64 [examples, max_new_tokens]."""
        assert self.data.generation is not None
        width = self.data.generation.max_new_tokens

        def write(items: Sequence[int]) -> Tensor:
            batch = self.data.prompt_batch(self.split, items)
            tokens = self.engine.forward(batch)
            # Zeros after the end do no harm: a batch is shorter only if all its rows have ended.
            return F.pad(tokens, (0, width - tokens.shape[1]))

        rows = _rows_by_length([len(ids) for ids in self.split.prompts])
        return self._spread(rows, width, write).long()

    def _objective_loss(self, tokens: Tensor | None) -> float:
        """Return the mean of the objective, with the generated `tokens` if it reads answers."""
        data = self.data

        def run(items: Sequence[int]) -> Tensor:
            batch = data.objective_batch(self.split, items)
            if data.objective.reads_answers and tokens is not None:
                outputs = tokens[items]
            else:
                batch, outputs = self._forward(batch)
            return data.loss(outputs, batch).unsqueeze(1)

        rows = _rows_by_length([example.num_tokens for example in self.split.encoded])
        return self._mean(self._spread(rows, 1, run).squeeze(1))

    def _forward(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor]:
        """Return a batch on this rank's device, and its outputs."""
        batch = to_device(batch, distributed.device())
        return batch, self.engine.forward(batch)

    def _spread(
        self,
        rows: Sequence[list[int]],
        width: int,
        run: Callable[[Sequence[int]], Tensor],
    ) -> Tensor:
        """Run items on all ranks, in batches of `batch_size` rows (see the module's docstring).

        Args:
            rows: the items, by number from 0, that share each row of a batch.
            width: number of values of an item.
            run: the collective (items of a batch) -> values, [items, width].

        Returns:
            float64 [all items, width], the same on every rank.
        """
        batches = [
            list(chain.from_iterable(rows[begin : begin + self.batch_size]))
            for begin in range(0, len(rows), self.batch_size)
        ]
        values = torch.zeros(sum(map(len, rows)), width, dtype=torch.float64)
        same_batches = self.engine.tensor_parallel  # ranks that run the same batches
        stride = distributed.world_size() // same_batches
        first = distributed.rank() // same_batches
        counts = distributed.rank() % same_batches == 0
        num_rounds = -(-len(batches) // stride)
        for index in range(first, num_rounds * stride, stride):
            items = batches[min(index, len(batches) - 1)]
            result = run(items).cpu().double()
            if index < len(batches) and counts:
                values[items] = result
        summed = distributed.sum_vector(values.flatten().to(distributed.device()))
        return torch.tensor(summed, dtype=torch.float64).view(values.shape)


def _rows_by_context(sequences: Sequence[TokenIds]) -> list[list[int]]:
    """Return the items that share each row of a batch of candidates, in order of length.

    Sequences that differ in their last token only are neighbors in this order.
    """
    order = sorted(range(len(sequences)), key=lambda item: (len(sequences[item]), sequences[item]))
    return [list(items) for _, items in groupby(order, key=lambda item: sequences[item][:-1])]


def _rows_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return a row for each item, in order of length."""
    return [[item] for item in sorted(range(len(lengths)), key=lambda item: lengths[item])]
