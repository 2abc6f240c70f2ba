"""Evaluation and prediction: a split is scored on all ranks, with the same result for any number.

`Task.score` and `Task.predict` decide what is computed, and a `Scorer` computes it.

Inputs are sorted by length, so that batches have little padding, and cut into batches before they
are given to ranks: the batches do not depend on the number of ranks. Rank r of R runs the batches
r, r + R, ... Each value is computed by one rank and is 0 on all others, so one sum gives all ranks
all values:

    batches          0    1    2    3    4          a forward pass is a collective, so a rank
    rank 0 runs      0         2         4          without a batch left runs the last one
    rank 1 runs           1         3   (4)         again, and drops what it gives

Ranks that split the weights by tensor parallelism run the same batches, and the first one counts.

If all sequences begin with the same tokens (instructions, demonstrations), a batch has these once
in a row that the sequences share. So it has what the candidates of an example begin with
(packing.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from lezo_ds import distributed
from lezo_ds.data.batches import (
    all_candidates,
    candidate_batch,
    teacher_forcing_batch,
    token_batch,
)
from lezo_ds.data.examples import EncodedExample, Example, Prediction, TokenCounts
from lezo_ds.data.generation import ended_answers, tidy
from lezo_ds.data.metrics import (
    LabelScore,
    label_scores,
    load_score,
    load_score_of_one,
    majority_score,
)
from lezo_ds.data.objectives import (
    count_right_tokens,
    teacher_forcing_loss,
    training_objective,
)
from lezo_ds.data.packing import can_pack, pack
from lezo_ds.data.reader import EncodedSplit, Reader
from lezo_ds.data.tasks import Task
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch, to_device

logger = logging.getLogger(__name__)

PREDICTED = "predicted"
"""Key of `predict`'s records: the answer, or the label or text of the best candidate."""
PROBABILITY = "probability"
"""Key of `predict`'s records: the probability of the best candidate among the candidates."""
OF_LABEL = f"{PROBABILITY}_"
"""How the keys of the probabilities of all labels begin; the label follows."""
NUM_SAMPLES = 4
"""Number of answers that an evaluation shows."""
_MEZO_LOSS_BATCH = 8
"""Examples in a batch of MeZO's validation loss, the default of transformers' Trainer."""
_FEW_DIFFERENT = 0.1
"""A run whose answers are alike to this share has probably collapsed to a few."""


class Model(Protocol):
    """The part of an engine that evaluation uses."""

    @property
    def module(self) -> Any:
        """The model, of transformers."""

    @property
    def tensor_parallel(self) -> int:
        """Number of ranks that run the same batches."""

    def forward(self, micro_batch: MicroBatch) -> Tensor:
        """Return the logits, or the new tokens, that a micro-batch selects. A collective."""


@dataclass(frozen=True)
class Scorer:
    """A model's outputs for the examples of a split, which `Task.score` asks for.

    What several methods need is computed once.

    Attributes:
        engine: the model.
        reader: how it reads examples.
        split: the examples.
        batch_size: sequences in a forward pass.
    """

    engine: Model
    reader: Reader
    split: EncodedSplit
    batch_size: int

    @cached_property
    def encoded(self) -> list[EncodedExample]:
        """The token ids of all examples of the split."""
        return list(self.split.encoded)

    def choices(self) -> list[int]:
        """Return the best candidate of each example. The first one wins a tie."""
        best: list[int] = self._candidate_scores.argmax(dim=1).tolist()
        return best

    def choice_probabilities(self) -> list[list[float]]:
        """Return the softmax of the scores of candidates, filled with 0 to the most candidates."""
        shares: list[list[float]] = self._candidate_scores.softmax(dim=1).tolist()
        return shares

    def choice_loss(self) -> float:
        """Return the mean cross-entropy over candidates."""
        golds = [example.gold for example in self.encoded]
        return F.cross_entropy(self._candidate_scores, torch.tensor(golds)).item()

    def gold_loss(self) -> float:
        """Return the mean loss of the right candidates' tokens."""
        pairs = zip(self.log_probabilities, self.encoded, strict=True)
        right = [total[example.gold] for total, example in pairs]
        return self._mean(-torch.stack(right))

    def answers(self) -> list[str]:
        """Return what the model writes after each prompt."""
        return self.reader.answers(self.new_tokens)

    def token_counts(self) -> list[TokenCounts]:
        """Return how many tokens of each conversation's turns are the model's first choice."""
        _, right = self._token_scores
        pairs = zip(right.tolist(), self.split.num_gold.tolist(), strict=True)
        return [TokenCounts(int(num_right), total) for num_right, total in pairs]

    def token_loss(self) -> float:
        """Return the mean loss of the tokens of these turns."""
        losses, _ = self._token_scores
        return self._mean(losses)

    def objective_loss(self) -> float:
        """Return the mean of the training objective, by forward passes of its own.

        Answers that no reward judges do not count. It is NaN if none is judged.
        """
        losses = self.objective_values[:, 0]
        if not self.reader.objective.is_reward:
            return self._mean(losses)
        num_unjudged = int(losses.isnan().sum())
        if num_unjudged and distributed.rank() == 0:
            logger.warning("%d of %d answers have no reward", num_unjudged, len(losses))
        return float(losses.nanmean())

    def rewards(self) -> dict[str, float]:
        """Return the mean of each of several rewards, of the answers that it applies to."""
        judges = self.reader.objective.rewards
        if judges is None:
            return {}
        means = self.objective_values[:, 1:].nanmean(dim=0)
        pairs = zip(judges.names, means.tolist(), strict=False)
        return {name: mean for name, mean in pairs if not math.isnan(mean)}

    def head_states(self, width: int) -> tuple[Tensor, Tensor]:
        """Return what the output head reads before each answer, and the logits of the candidates.

        All examples have the same candidates, each of one token.

        Args:
            width: number of values that the head reads of a token.

        Returns:
            float64 [examples, width] and [examples, candidates], the same on every rank.
        """
        encoded = self.encoded
        head = self.engine.module.get_output_embeddings()
        seen: list[Tensor] = []

        def read(items: Sequence[int]) -> Tensor:
            chosen = [encoded[item] for item in items]
            batch = self._laid_out(candidate_batch(chosen, self.reader.tokenizer.pad_id))
            logits = self.engine.forward(batch)
            assert batch.selection is not None
            hidden = seen.pop()[batch.selection.rows, batch.selection.positions]
            return torch.cat([hidden.float(), logits.float()], dim=1)

        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        values = self._spread(self.split.lengths, width + len(encoded[0].sequences), read)
        hook.remove()
        return values[:, :width], values[:, width:]

    @cached_property
    def log_probabilities(self) -> list[Tensor]:
        """The summed log-probability of the tokens of each candidate.

        It has float64 [candidates] for each example.
        """
        encoded = self.encoded
        candidates = all_candidates(encoded)
        sequences = [example.sequences[number] for example, number in candidates]
        num_candidates = [len(example.sequences) for example in encoded]
        example_of = torch.arange(len(encoded)).repeat_interleave(torch.tensor(num_candidates))
        contexts = [{ids[:-1] for ids in example.sequences} for example in encoded]
        num_contexts = max(map(len, contexts))
        # Rows that cannot be shared in the end are no more than `batch_size`, too.
        are_together = self._takes_packed and 1 < num_contexts <= self.batch_size

        def score(items: Sequence[int]) -> Tensor:
            chosen = [candidates[item] for item in items]
            pad_id = self.reader.tokenizer.pad_id
            batch = token_batch(chosen, pad_id, share_rows=not are_together)
            if are_together:
                _, examples = torch.unique(example_of[items], return_inverse=True)
                batch = replace(batch, token_examples=examples[:, None])
            batch, logits = self._forward(batch)
            return -teacher_forcing_loss(logits, batch).unsqueeze(1)

        keys: list[object] = [ids[:-1] for ids in sequences]
        rows_of_a_key = 1
        if are_together:
            keys = example_of.tolist()
            rows_of_a_key = num_contexts
        lengths = np.array(list(map(len, sequences)))
        sums = self._spread(lengths, 1, score, keys, rows_of_a_key)
        return list(torch.split(sums.squeeze(1), num_candidates))

    @cached_property
    def new_tokens(self) -> Tensor:
        """What the model writes after each prompt, int64 [examples, max_new_tokens]."""
        assert self.reader.generation is not None
        width = self.reader.generation.max_new_tokens

        def write(items: Sequence[int]) -> Tensor:
            batch = self.reader.prompt_batch(self.split, items)
            tokens = self.engine.forward(batch)
            # Zeros after the end do no harm: a batch is shorter only if all its rows have ended.
            return F.pad(tokens, (0, width - tokens.shape[1]))

        return self._spread(self.split.column("prompt_length"), width, write).long()

    @cached_property
    def _candidate_scores(self) -> Tensor:
        """The mean log-probability of each candidate's tokens, float64 [examples, most candidates].

        It is filled with -inf.
        """
        pairs = zip(self.log_probabilities, self.encoded, strict=True)
        means = [total / torch.tensor(example.option_lengths) for total, example in pairs]
        return pad_sequence(means, batch_first=True, padding_value=float("-inf"))

    @cached_property
    def _token_scores(self) -> Tensor:
        """The summed loss of each conversation, and its right tokens, float64 [2, examples]."""
        encoded = self.encoded

        def score(items: Sequence[int]) -> Tensor:
            examples = [encoded[item] for item in items]
            batch = teacher_forcing_batch(examples, self.reader.tokenizer.pad_id).with_logits()
            batch, logits = self._forward(batch)
            return torch.stack(
                [teacher_forcing_loss(logits, batch), count_right_tokens(logits, batch)], dim=1
            )

        return self._spread(self.split.lengths, 2, score).T

    @cached_property
    def objective_values(self) -> Tensor:
        """The training objective of each example, and its rewards, float64 [examples, 1 + n]."""
        reader = self.reader
        tokens = self.new_tokens if reader.objective.reads_answers else None
        judges = reader.objective.rewards
        width = 1 if judges is None else 1 + len(judges.functions)

        def run(items: Sequence[int]) -> Tensor:
            batch = reader.objective_batch(self.split, items)
            if tokens is None:
                batch, outputs = self._forward(batch)
            else:
                outputs = tokens[items]
            if judges is None:
                return reader.loss(outputs, batch).unsqueeze(1)
            answers = reader.answers(outputs, as_written=True)
            scores = judges.scores(answers, batch.examples)
            losses = judges.loss_of(scores)
            return torch.cat([losses[:, None], scores], dim=1)

        return self._spread(self.split.lengths, width, run)

    def _mean(self, losses: Tensor) -> float:
        """Return the mean of the objective from its sum over each example, float64 [examples].

        With protocol mezo, it is the mean over batches, each of which counts by its number of
        examples, as transformers' Trainer averages.
        """
        num_terms = torch.ones(len(losses))
        if self.reader.objective.counts_tokens:
            num_terms = torch.from_numpy(self.split.num_gold)
        if self.reader.config.data.protocol != "mezo":
            return float(losses.sum() / num_terms.sum())
        total = 0.0
        batches = torch.split(losses, _MEZO_LOSS_BATCH)
        terms = torch.split(num_terms, _MEZO_LOSS_BATCH)
        for batch, batch_terms in zip(batches, terms, strict=True):
            total += len(batch) * float(batch.sum() / batch_terms.sum())
        return total / len(losses)

    @cached_property
    def _takes_packed(self) -> bool:
        """Whether sequences may share rows."""
        # Of a model with a trained prefix, the attention is no longer one that takes packed rows.
        return can_pack(self.engine.module.config, self.reader.config.data.max_length)

    def _forward(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor]:
        """Return a batch on this rank's device, and its outputs."""
        outputs = self.engine.forward(self._laid_out(batch))
        return to_device(batch, distributed.device()), outputs

    def _laid_out(self, batch: MicroBatch) -> MicroBatch:
        """Return a batch as it runs: with sequences that share rows, if they may."""
        return pack(batch, self.split.num_start) if self._takes_packed else batch

    def _spread(
        self,
        lengths: np.ndarray,
        width: int,
        run: Callable[[Sequence[int]], Tensor],
        keys: Sequence[object] = (),
        rows_of_a_key: int = 1,
    ) -> Tensor:
        """Run items on all ranks, in batches of `batch_size` rows (see the module's docstring).

        Args:
            lengths: of the items, in tokens. The shortest run first.
            width: number of values of an item.
            run: the collective (items of a batch) -> values, [items, width].
            keys: items of the same key are in the same batch; () if each has its own.
            rows_of_a_key: the rows that all items of a key may need.

        Returns:
            float64 [all items, width], the same on every rank.
        """
        items_of: dict[object, list[int]] = {}
        for item, key in enumerate(keys or range(len(lengths))):
            items_of.setdefault(key, []).append(item)
        groups = sorted(items_of.values(), key=lambda items: int(lengths[items].max()))
        size = self.batch_size // rows_of_a_key
        batches = [
            list(chain.from_iterable(groups[begin : begin + size]))
            for begin in range(0, len(groups), size)
        ]
        values = torch.zeros(len(lengths), width, dtype=torch.float64)
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
        return distributed.sum_tensor(values.to(distributed.device())).cpu()


@dataclass(frozen=True)
class EvaluationResult:
    """The result of scoring a split. It is the same on every rank.

    Attributes:
        loss: mean of the training objective.
        score: the task's metric, 0 to 1 if it is one of ours; or the mean reward, which may be any
            number, and NaN if no answer was judged.
        majority_class: score of always predicting the most frequent label; None if there are no
            classes, or if the metric has no score for it.
        predicted: a prediction for each example.
        by_label: of a classification, the scores of each label; else None.
        rewards: the mean of each reward, if the objective has several.
        samples: if the objective judges answers, the first of them, each with the keys index (of
            the example in its file), prompt, answer, reward (minus its loss; None if no reward
            applies), ended (before generation.max_new_tokens) and rewards (of several).
        numbers: of all these answers, share_ended, num_different, and mean_length in characters.
    """

    loss: float
    score: float
    majority_class: float | None
    predicted: tuple[Prediction, ...]
    by_label: Mapping[str, LabelScore] | None
    rewards: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def macro_f1(self) -> float | None:
        """The mean F1 of the labels; None unless the task is a classification."""
        if self.by_label is None:
            return None
        return fmean(score.f1 for score in self.by_label.values())


def evaluate(
    engine: Model, reader: Reader, split: EncodedSplit, batch_size: int
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
    examples = list(split.examples)
    loss, found = task.score(scorer)
    predicted: list[Any] = list(found)
    # The task's own loss follows from the scores. Any other needs passes of its own.
    if reader.objective != training_objective(task):
        loss = scorer.objective_loss()
    score = load_score(task)
    by_label = None
    majority = None
    if task.has_classes and examples[0].label is not None:
        names = list(map(str, task.names(examples[0])))
        right = [names[example.label or 0] for example in examples]
        by_label = label_scores(right, [names[choice] for choice in predicted])
    has_majority = task.has_answers and not (task.writes_answers or examples[0].references)
    if score is not None and has_majority:
        majority = majority_score(score, examples)
    result = EvaluationResult(
        loss,
        # The metric without a score is the reward, and the loss is minus the mean reward. Adding 0
        # makes 0 of -0.
        score=0.0 - loss if score is None else score(predicted, examples),
        majority_class=majority,
        predicted=tuple(predicted),
        by_label=by_label,
        rewards=scorer.rewards(),
    )
    if not reader.objective.reads_answers:
        return result
    samples, numbers = _samples(scorer)
    return replace(result, samples=samples, numbers=numbers)


def _samples(scorer: Scorer) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the first answers and numbers of all; see `EvaluationResult`."""
    reader = scorer.reader
    assert reader.generation is not None
    tokens = scorer.new_tokens
    ended = ended_answers(tokens, reader.generation, reader.tokenizer)
    answers = reader.answers(tokens, as_written=reader.objective.is_reward)
    judges = reader.objective.rewards
    names = () if judges is None else judges.names
    samples = []
    for number, answer in enumerate(answers[:NUM_SAMPLES]):
        example = scorer.split.examples[number]
        values = scorer.objective_values[number].tolist()
        loss, *scores = [None if math.isnan(value) else value for value in values]
        samples.append(
            {
                "index": example.index,
                "prompt": example.prompt,
                "answer": tidy(answer),
                "reward": None if loss is None else 0.0 - loss,
                "ended": ended[number],
                "rewards": dict(zip(names, scores, strict=False)),
            }
        )
    num_different = len(set(answers))
    if num_different <= _FEW_DIFFERENT * len(answers) and distributed.rank() == 0:
        logger.warning(
            "only %d of the answers to %d prompts are different", num_different, len(answers)
        )
    numbers = {
        "share_ended": fmean(ended),
        "num_different": num_different,
        "mean_length": fmean(map(len, answers)),
    }
    return samples, numbers


def predict(
    engine: Model,
    reader: Reader,
    split: EncodedSplit,
    batch_size: int,
    *,
    probabilities: bool = False,
    threshold: float = 0.0,
) -> list[dict[str, Any]]:
    """Return the model's prediction for each example. A collective.

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

    Raises:
        UserError: a score is not a number.
    """
    scorer = Scorer(engine, reader, split, batch_size)
    rows = []
    for predicted in reader.task.predict(scorer, split.examples):
        row = {PREDICTED: predicted.answer}
        if predicted.probability is not None:
            if math.isnan(predicted.probability):
                raise UserError(
                    f"{type(engine.module).__name__} computes scores that are not finite",
                    fix="use the weights of another step, or model.dtype=fp32",
                )
            row[PROBABILITY] = round(predicted.probability, 6)
            if predicted.probability < threshold:
                row[PREDICTED] = ""
        if probabilities:
            for label, share in predicted.by_name.items():
                row[f"{OF_LABEL}{label}"] = round(share, 6)
        rows.append(row)
    return rows


def prediction_rows(
    task: Task, examples: Sequence[Example], predicted: Sequence[Prediction]
) -> list[dict[str, Any]]:
    """Return a JSON record for each example: its index, prompt, right answers and prediction.

    It also has the score, 0 to 1, if the metric is a mean over examples.
    """
    score = load_score_of_one(task)
    rows = []
    for example, prediction in zip(examples, predicted, strict=True):
        row = {
            "index": example.index,
            "prompt": example.prompt,
            "right": [answer.strip() for answer in example.right_texts],
            "predicted": task.shown(example, prediction),
        }
        if score is not None:
            row["score"] = score([prediction], [example])
        rows.append(row)
    return rows
