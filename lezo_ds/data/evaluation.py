"""Evaluation: scoring of examples, shared among the ranks, with the same result for any number of ranks.

Inputs are sorted by length, so that batches have little padding, and batches do not depend on the number of
ranks. Each value is computed by one rank and is 0 on the others, so one sum gives all ranks all values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from lezo_ds import distributed
from lezo_ds.data.batches import scoring_batch, teacher_forcing_batch
from lezo_ds.data.encoding import EncodedExample
from lezo_ds.data.objectives import count_right_tokens, teacher_forcing_loss, training_objective
from lezo_ds.data.task_data import EncodedSplit, TaskData
from lezo_ds.forward.batch import MicroBatch, to_device
from lezo_ds.tasks.base import Example
from lezo_ds.tasks.metrics import Prediction, TokenCounts, find_score, majority_class_score

T = TypeVar("T")
PREDICTED, PROBABILITY = "predicted", "probability"


@dataclass(frozen=True)
class EvaluationResult:
    loss: float
    """Mean of the training objective."""
    score: float
    """The task's metric, 0 to 1; or the mean reward, which may be any number."""
    majority_class: float | None
    """Score of always predicting the most frequent label; None if there are no classes."""
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
    """Return the loss and the score of a split, from `batch_size` sequences at a time. A collective."""
    return _Evaluation(engine, data, split, batch_size).run()


def predict(
    engine: Model, data: TaskData, split: EncodedSplit, batch_size: int
) -> list[dict[str, Any]]:
    """Return for each example the answer, or the label or text of the best candidate. A collective.

    `probability` is the softmax of its candidates' scores, which are mean log-probabilities of tokens.
    """
    run, labels = _Evaluation(engine, data, split, batch_size), data.task.labels
    if split.prompts:
        return [{PREDICTED: answer} for answer in data.answers(run._new_tokens())]
    scores = run._means(run._log_probabilities(split.encoded))
    best, shares = scores.argmax(dim=1).tolist(), scores.softmax(dim=1).amax(dim=1).tolist()
    return [
        {
            PREDICTED: labels[row] if labels else answer_text(example, row),
            PROBABILITY: round(share, 6),
        }
        for example, row, share in zip(split.examples, best, shares, strict=True)
    ]


def answer_text(example: Example, predicted: Prediction) -> str:
    if isinstance(predicted, TokenCounts):
        return f"{predicted.right} of {predicted.total} tokens"
    return (predicted if isinstance(predicted, str) else example.candidates[predicted]).strip()


def prediction_rows(
    examples: Sequence[Example], predicted: Sequence[Prediction]
) -> list[dict[str, Any]]:
    return [
        {
            "index": example.index,
            "prompt": example.prompt,
            "right": [text.strip() for text in example.references or example.gold_texts],
            "predicted": answer_text(example, answer),
        }
        for example, answer in zip(examples, predicted, strict=True)
    ]


@dataclass(frozen=True)
class _Evaluation:
    engine: Model
    data: TaskData
    split: EncodedSplit
    batch_size: int

    def run(self) -> EvaluationResult:
        data, examples = self.data, self.split.examples
        tokens = self._new_tokens() if self.split.prompts else None
        predicted: Sequence[Prediction]
        # The task's own loss follows from the scores, so it needs no further passes.
        is_own_loss = data.objective == training_objective(data.task.kind)
        if data.task.kind == "generation":
            assert tokens is not None
            predicted, loss = data.answers(tokens), self._objective_loss(tokens)
        elif data.task.kind == "chat":
            losses, predicted = self._token_scores()
            loss = self._mean(losses) if is_own_loss else self._objective_loss(tokens)
        else:
            sums = self._log_probabilities(self.split.encoded)
            loss = self._task_loss(sums) if is_own_loss else self._objective_loss(tokens)
            predicted = self._means(sums).argmax(dim=1).tolist()  # the first one wins a tie
        measure = find_score(data.task.metric, data.task.kind)
        # Without a measure, the loss is minus the mean reward.
        score = -loss if measure is None else measure(predicted, examples)
        return EvaluationResult(
            loss, score, majority_class_score(examples, measure), tuple(predicted)
        )

    def _means(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the mean log-probability of each candidate's tokens.

        It is float64 [examples, candidates], filled with -inf.
        """
        pairs = zip(sums, self.split.encoded, strict=True)
        return _padded([total / torch.tensor(example.option_lengths) for total, example in pairs])

    def _task_loss(self, sums: Sequence[Tensor]) -> float:
        golds = [example.gold for example in self.split.encoded]
        if self.data.task.kind == "classification":
            return F.cross_entropy(self._means(sums), torch.tensor(golds)).item()
        return self._mean(
            -torch.stack([summed[gold] for summed, gold in zip(sums, golds, strict=True)])
        )

    def _mean(self, losses: Tensor) -> float:
        """Return the mean of the objective from its sum over each example, float64 [examples]."""
        num_terms = torch.tensor([self.data.objective.num_terms(e) for e in self.split.encoded])
        if self.data.loss_batch is None:
            return float(losses.sum() / num_terms.sum())
        parts = _cut(list(range(len(losses))), self.data.loss_batch)
        sums = [len(rows) * float(losses[rows].sum() / num_terms[rows].sum()) for rows in parts]
        return sum(sums) / len(losses)

    def _log_probabilities(self, encoded: Sequence[EncodedExample]) -> list[Tensor]:
        """Return the summed log-probability of each candidate's tokens: float64 [candidates] per example.

        Equal sequences run once. Those that differ in their last token only run as one row (`scoring_batch`).
        """
        wanted = [
            list(zip(example.sequences, example.option_lengths, strict=True)) for example in encoded
        ]
        distinct = sorted(set(chain.from_iterable(wanted)), key=lambda pair: (len(pair[0]), pair))
        rows = [
            list(same)
            for _, same in groupby(range(len(distinct)), key=lambda i: distinct[i][0][:-1])
        ]
        groups = [list(chain.from_iterable(group)) for group in _cut(rows, self.batch_size)]

        def score(group: Sequence[int]) -> Tensor:
            sequences, lengths = zip(*(distinct[i] for i in group), strict=True)
            batch = scoring_batch(sequences, lengths, self.data.tokenizer.pad_id)
            batch = to_device(batch, distributed.device())
            return -teacher_forcing_loss(self.engine.forward(batch), batch).unsqueeze(1)

        sums = dict(zip(distinct, self._share(groups, 1, score).squeeze(1), strict=True))
        return [torch.stack([sums[pair] for pair in pairs]) for pairs in wanted]

    def _token_scores(self) -> tuple[Tensor, list[TokenCounts]]:
        encoded = self.split.encoded

        def score(group: Sequence[int]) -> Tensor:
            batch = teacher_forcing_batch(
                [encoded[row] for row in group], self.data.tokenizer.pad_id
            )
            batch = to_device(batch, distributed.device())
            logits = self.engine.forward(batch)
            return torch.stack(
                [teacher_forcing_loss(logits, batch), count_right_tokens(logits, batch)], 1
            )

        groups = _groups([example.num_tokens for example in encoded], self.batch_size)
        losses, right = self._share(groups, 2, score).unbind(dim=1)
        pairs = zip(right, encoded, strict=True)
        return losses, [
            TokenCounts(int(count), example.num_gold_tokens()) for count, example in pairs
        ]

    def _new_tokens(self) -> Tensor:
        """Return the tokens that the model generates after each prompt, int64 [examples, max_new_tokens]."""
        assert self.data.generation is not None
        width = self.data.generation.max_new_tokens

        def write(group: Sequence[int]) -> Tensor:
            tokens = self.engine.forward(self.data.prompt_batch(self.split, group))
            # Zeros after the end do no harm: a batch is shorter only if all its rows have a stop token.
            return F.pad(tokens, (0, width - tokens.shape[1]))

        lengths = [len(ids) for ids in self.split.prompts]
        return self._share(_groups(lengths, self.batch_size), width, write).long()

    def _objective_loss(self, tokens: Tensor | None) -> float:
        """Return the mean of the objective, with the generated `tokens` if it reads answers."""
        data = self.data
        known = tokens if data.objective.reads_answers else None

        def losses(group: Sequence[int]) -> Tensor:
            batch = to_device(data.objective_batch(self.split, group), distributed.device())
            outputs = self.engine.forward(batch) if known is None else known[group]
            return data.loss(outputs, batch).unsqueeze(1)

        lengths = [example.num_tokens for example in self.split.encoded]
        return self._mean(self._share(_groups(lengths, self.batch_size), 1, losses).squeeze(1))

    def _share(
        self, groups: Sequence[Sequence[int]], width: int, run: Callable[[Sequence[int]], Tensor]
    ) -> Tensor:
        """Return float64 [items, width]: `run(group)` is [items of the group, width]."""
        num_groups, together = len(groups), self.engine.tensor_parallel
        num_shares = distributed.world_size() // together
        values = torch.zeros(sum(map(len, groups)), width, dtype=torch.float64)
        # `run` is a collective: ranks without a group left run the last one again and drop the result.
        first = distributed.rank() // together
        for index in range(first, -(-num_groups // num_shares) * num_shares, num_shares):
            group = groups[min(index, num_groups - 1)]
            rows = run(group)
            if index < num_groups and distributed.rank() % together == 0:
                values[group] = rows.cpu().double()
        summed = distributed.sum_vector(values.flatten().to(distributed.device()))
        return torch.tensor(summed, dtype=torch.float64).view(values.shape)


def _padded(scores: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(scores), batch_first=True, padding_value=float("-inf"))


def _groups(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return the indices of the items in order of length, cut into batches."""
    return _cut(sorted(range(len(lengths)), key=lambda i: lengths[i]), batch_size)


def _cut(items: list[T], size: int) -> list[list[T]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]
