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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from lezo_ds import distributed
from lezo_ds.data.batches import scoring_batch, teacher_forcing_batch
from lezo_ds.data.metrics import load_score, majority_score
from lezo_ds.data.objectives import count_right_tokens, teacher_forcing_loss, training_objective
from lezo_ds.data.task_data import EncodedSplit, TaskData
from lezo_ds.forward.batch import MicroBatch, to_device
from lezo_ds.tasks.base import Example
from lezo_ds.tasks.metrics import Prediction, TokenCounts

T = TypeVar("T")

_Scored = tuple[tuple[int, ...], int]
"""A sequence of tokens, and how many at its end are scored."""

PREDICTED = "predicted"
"""Key of `predict`'s records: the answer, or the label or text of the best candidate."""
PROBABILITY = "probability"
"""Key of `predict`'s records: the probability of the best candidate among the candidates."""


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
    """

    loss: float
    score: float
    majority_class: float | None
    predicted: tuple[Prediction, ...]


class Model(Protocol):
    """The part of an engine that evaluation uses."""

    @property
    def tensor_parallel(self) -> int:
        """Number of ranks that run the same batches."""

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the logits, or the new tokens, that a micro-batch selects. A collective."""


def evaluate(
    engine: Model, data: TaskData, split: EncodedSplit, batch_size: int
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
    return _Evaluation(engine, data, split, batch_size).run()


def predict(
    engine: Model, data: TaskData, split: EncodedSplit, batch_size: int
) -> list[dict[str, Any]]:
    """Return for each example what the model makes of it. A collective.

    A record has the key PREDICTED and, for candidates, PROBABILITY: the softmax of the candidates'
    scores, which are mean log-probabilities of tokens.
    """
    evaluation = _Evaluation(engine, data, split, batch_size)
    rows: list[dict[str, Any]] = []
    if split.prompts:
        for answer in data.answers(evaluation.new_tokens()):
            rows.append({PREDICTED: answer})
        return rows
    scores = evaluation.candidate_scores(evaluation.log_probabilities())
    best: list[int] = scores.argmax(dim=1).tolist()
    probabilities = scores.softmax(dim=1).amax(dim=1)
    labels = data.task.labels
    for index, example in enumerate(split.examples):
        choice = best[index]
        predicted = labels[choice] if labels else answer_text(example, choice)
        probability = round(float(probabilities[index]), 6)
        rows.append({PREDICTED: predicted, PROBABILITY: probability})
    return rows


def answer_text(example: Example, predicted: Prediction) -> str:
    """Return a prediction as a reader sees it."""
    if isinstance(predicted, TokenCounts):
        return f"{predicted.right} of {predicted.total} tokens"
    if isinstance(predicted, str):
        return predicted.strip()
    return example.candidates[predicted].strip()


def prediction_rows(
    examples: Sequence[Example], predicted: Sequence[Prediction]
) -> list[dict[str, Any]]:
    """Return a JSON record for each example: its index, prompt, right answers and prediction."""
    rows = []
    for example, prediction in zip(examples, predicted, strict=True):
        right = example.references or example.gold_texts
        row = {
            "index": example.index,
            "prompt": example.prompt,
            "right": [text.strip() for text in right],
            "predicted": answer_text(example, prediction),
        }
        rows.append(row)
    return rows


@dataclass(frozen=True)
class _Evaluation:
    """One evaluation. The fields are the arguments of `evaluate`, and scoring is a collective."""

    engine: Model
    data: TaskData
    split: EncodedSplit
    batch_size: int

    def run(self) -> EvaluationResult:
        examples = self.split.examples
        loss, predicted = self._loss_and_predictions()
        score = load_score(self.data.task)
        return EvaluationResult(
            loss=loss,
            # The metric without a score is the reward, and the loss is minus the mean reward.
            score=-loss if score is None else score(predicted, examples),
            majority_class=majority_score(score, examples),
            predicted=tuple(predicted),
        )

    def _loss_and_predictions(self) -> tuple[float, Sequence[Prediction]]:
        data = self.data
        kind = data.task.kind
        tokens = self.new_tokens() if self.split.prompts else None
        if kind == "generation":
            assert tokens is not None
            return self._objective_loss(tokens), data.answers(tokens)
        predicted: Sequence[Prediction]
        if kind == "chat":
            losses, predicted = self._token_scores()
            own_loss = self._mean(losses)
        else:
            sums = self.log_probabilities()
            scores = self.candidate_scores(sums)
            predicted = scores.argmax(dim=1).tolist()  # the first one wins a tie
            own_loss = self._own_loss(sums, scores)
        # The task's own loss follows from the scores. Another objective needs further passes.
        if data.objective == training_objective(kind):
            return own_loss, predicted
        return self._objective_loss(tokens), predicted

    def candidate_scores(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the mean log-probability of each candidate's tokens.

        It is float64 [examples, most candidates], filled with -inf. `sums` are those of
        `log_probabilities`.
        """
        means = []
        for total, example in zip(sums, self.split.encoded, strict=True):
            means.append(total / torch.tensor(example.option_lengths))
        return pad_sequence(means, batch_first=True, padding_value=float("-inf"))

    def _own_loss(self, sums: Sequence[Tensor], scores: Tensor) -> float:
        """Return the mean of the task's own loss, from the candidates' log-probabilities."""
        golds = [example.gold for example in self.split.encoded]
        if self.data.task.kind == "classification":
            return F.cross_entropy(scores, torch.tensor(golds)).item()
        losses = [-total[gold] for total, gold in zip(sums, golds, strict=True)]
        return self._mean(torch.stack(losses))

    def _mean(self, losses: Tensor) -> float:
        """Return the mean of the objective from its sum over each example, float64 [examples].

        If a batch size is set for the loss, it is the mean over batches, each of which counts by
        its number of examples, as transformers' Trainer averages.
        """
        num_terms_of = self.data.objective.num_terms
        num_terms = torch.tensor([num_terms_of(example) for example in self.split.encoded])
        if self.data.loss_batch is None:
            return float(losses.sum() / num_terms.sum())
        total = 0.0
        for begin in range(0, len(losses), self.data.loss_batch):
            batch = slice(begin, begin + self.data.loss_batch)
            mean = float(losses[batch].sum() / num_terms[batch].sum())
            total += len(losses[batch]) * mean
        return total / len(losses)

    def log_probabilities(self) -> list[Tensor]:
        """Return the summed log-probability of the tokens of each candidate.

        The result has float64 [candidates] for each example. Equal sequences run once.
        """
        pairs_of: list[list[_Scored]] = []
        for example in self.split.encoded:
            pairs = zip(example.sequences, example.option_lengths, strict=True)
            pairs_of.append(list(pairs))
        distinct = sorted(set().union(*pairs_of), key=_by_length)
        groups = _groups_of_rows(distinct, self.batch_size)

        def score(group: Sequence[int]) -> Tensor:
            sequences = [distinct[index][0] for index in group]
            lengths = [distinct[index][1] for index in group]
            batch = scoring_batch(sequences, lengths, self.data.tokenizer.pad_id)
            batch = to_device(batch, distributed.device())
            losses = teacher_forcing_loss(self.engine.forward(batch), batch)
            return -losses.unsqueeze(1)

        sums = self._spread(groups, 1, score).squeeze(1)
        sum_of = dict(zip(distinct, sums, strict=True))
        return [torch.stack([sum_of[pair] for pair in pairs]) for pairs in pairs_of]

    def _token_scores(self) -> tuple[Tensor, list[TokenCounts]]:
        """Return the summed loss of each conversation, float64 [examples], and its right tokens."""
        encoded = self.split.encoded

        def score(group: Sequence[int]) -> Tensor:
            examples = [encoded[row] for row in group]
            batch = teacher_forcing_batch(examples, self.data.tokenizer.pad_id)
            batch = to_device(batch, distributed.device())
            logits = self.engine.forward(batch)
            losses = teacher_forcing_loss(logits, batch)
            return torch.stack([losses, count_right_tokens(logits, batch)], dim=1)

        groups = _groups([example.num_tokens for example in encoded], self.batch_size)
        losses, right = self._spread(groups, 2, score).unbind(dim=1)
        counts = []
        for num_right, example in zip(right.tolist(), encoded, strict=True):
            counts.append(TokenCounts(int(num_right), example.num_gold_tokens()))
        return losses, counts

    def new_tokens(self) -> Tensor:
        """Return what the model writes after each prompt, int64 [examples, max_new_tokens]."""
        assert self.data.generation is not None
        width = self.data.generation.max_new_tokens

        def write(group: Sequence[int]) -> Tensor:
            batch = self.data.prompt_batch(self.split, group)
            tokens = self.engine.forward(batch)
            # Zeros after the end do no harm: a batch is shorter only if all its rows have ended.
            num_missing = width - tokens.shape[1]
            return F.pad(tokens, (0, num_missing))

        lengths = [len(ids) for ids in self.split.prompts]
        groups = _groups(lengths, self.batch_size)
        return self._spread(groups, width, write).long()

    def _objective_loss(self, tokens: Tensor | None) -> float:
        """Return the mean of the objective, with the generated `tokens` if it reads answers."""
        data = self.data

        def run(group: Sequence[int]) -> Tensor:
            batch = data.objective_batch(self.split, group)
            batch = to_device(batch, distributed.device())
            if data.objective.reads_answers and tokens is not None:
                outputs = tokens[group]
            else:
                outputs = self.engine.forward(batch)
            return data.loss(outputs, batch).unsqueeze(1)

        lengths = [example.num_tokens for example in self.split.encoded]
        groups = _groups(lengths, self.batch_size)
        losses = self._spread(groups, 1, run).squeeze(1)
        return self._mean(losses)

    def _spread(
        self,
        groups: Sequence[Sequence[int]],
        width: int,
        run: Callable[[Sequence[int]], Tensor],
    ) -> Tensor:
        """Run groups of items on the ranks (see the module's docstring).

        Args:
            groups: the indices of the items in each batch. Each item is in one batch.
            width: number of values of an item.
            run: the collective (group) -> values, [items of the group, width].

        Returns:
            float64 [items, width], the same on all ranks.
        """
        num_items = sum(len(group) for group in groups)
        values = torch.zeros(num_items, width, dtype=torch.float64)
        same_batches = self.engine.tensor_parallel  # ranks that run the same batches
        stride = distributed.world_size() // same_batches
        first = distributed.rank() // same_batches
        counts = distributed.rank() % same_batches == 0
        num_rounds = -(-len(groups) // stride)
        for index in range(first, num_rounds * stride, stride):
            is_left = index < len(groups)
            group = groups[index] if is_left else groups[-1]
            rows = run(group)
            if is_left and counts:
                values[group] = rows.cpu().double()
        summed = distributed.sum_vector(values.flatten().to(distributed.device()))
        return torch.tensor(summed, dtype=torch.float64).view(values.shape)


def _by_length(scored: _Scored) -> tuple[int, _Scored]:
    return len(scored[0]), scored


def _groups_of_rows(distinct: Sequence[_Scored], batch_size: int) -> list[list[int]]:
    """Cut sequences, in the order of `_by_length`, into batches of `batch_size` rows.

    Sequences that differ in their last token only share a row of a batch (see `scoring_batch`), and
    are neighbors in this order.
    """
    rows: list[list[int]] = []
    last_context = None
    for index, (ids, _) in enumerate(distinct):
        context = ids[:-1]
        if context != last_context:
            rows.append([])
        rows[-1].append(index)
        last_context = context
    groups = []
    for batch_rows in _cut(rows, batch_size):
        groups.append([index for row in batch_rows for index in row])
    return groups


def _groups(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return the indices of items in order of their length, cut into batches."""
    by_length = sorted(range(len(lengths)), key=lambda index: lengths[index])
    return _cut(by_length, batch_size)


def _cut(items: list[T], size: int) -> list[list[T]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]
