"""Scores of a split on all ranks, with the same result for any number of ranks.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby, islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from lezo_ds import distributed
from lezo_ds.data.batches import all_candidates, teacher_forcing_batch, token_batch
from lezo_ds.data.objectives import count_right_tokens, teacher_forcing_loss
from lezo_ds.data.packing import can_pack, pack
from lezo_ds.data.reader import EncodedSplit, Reader
from lezo_ds.forward.batch import MicroBatch, to_device
from lezo_ds.tasks.base import EncodedExample, TokenCounts, TokenIds


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
    """What a model makes of the examples of a split: the `Scorer` of `Task.score`.

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
        golds = [example.gold for example in self.split.encoded]
        return F.cross_entropy(self._candidate_scores, torch.tensor(golds)).item()

    def gold_loss(self) -> float:
        """Return the mean loss of the right candidates' tokens."""
        pairs = zip(self.log_probabilities, self.split.encoded, strict=True)
        right = [total[example.gold] for total, example in pairs]
        return self._mean(-torch.stack(right))

    def answers(self) -> list[str]:
        """Return what the model writes after each prompt."""
        return self.reader.answers(self.new_tokens)

    def token_counts(self) -> list[TokenCounts]:
        """Return how many tokens of each conversation's turns are the model's first choice."""
        _, right = self._token_scores
        return [
            TokenCounts(int(num_right), example.num_gold_tokens())
            for num_right, example in zip(right.tolist(), self.split.encoded, strict=True)
        ]

    def token_loss(self) -> float:
        """Return the mean loss of the tokens of these turns."""
        losses, _ = self._token_scores
        return self._mean(losses)

    def objective_loss(self) -> float:
        """Return the mean of the training objective, by forward passes of its own."""
        return self._mean(self.objective_values[:, 0])

    def rewards(self) -> dict[str, float]:
        """Return the mean of each of several rewards, of the answers that it applies to."""
        functions = self.reader.objective.rewards
        if functions is None or len(functions.names) == 1:
            return {}
        means = self.objective_values[:, 1:].nanmean(dim=0).nan_to_num()
        return dict(zip(functions.names, means.tolist(), strict=True))

    def head_states(self, tokens: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
        """Return what the output head reads before each answer, and the logits of some tokens.

        Args:
            tokens: of the vocabulary. Each candidate of the split is one token.
            width: number of values that the head reads of a token.

        Returns:
            float64 [examples, width] and [examples, len(tokens)], the same on every rank.
        """
        encoded = self.split.encoded
        head = self.engine.module.get_output_embeddings()
        entries = torch.tensor(tokens)
        seen: list[Tensor] = []

        def read(items: Sequence[int]) -> Tensor:
            first_candidates = [(encoded[item], 0) for item in items]
            batch = token_batch(first_candidates, self.reader.tokenizer.pad_id).with_logits()
            assert batch.selection is not None
            selection = replace(batch.selection, vocabulary=entries)
            laid_out = self._laid_out(replace(batch, selection=selection))
            logits = self.engine.forward(laid_out)
            assert laid_out.selection is not None
            hidden = seen.pop()[laid_out.selection.rows, laid_out.selection.positions]
            return torch.cat([hidden.float(), logits.float()], dim=1)

        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        rows = _rows_by_length([example.num_tokens for example in encoded])
        values = self._spread(rows, width + len(tokens), read)
        hook.remove()
        return values[:, :width], values[:, width:]

    @cached_property
    def log_probabilities(self) -> list[Tensor]:
        """The summed log-probability of the tokens of each candidate.

        It has float64 [candidates] for each example.
        """
        encoded = self.split.encoded
        candidates = all_candidates(encoded)
        num_candidates = [len(example.sequences) for example in encoded]
        example_of = torch.arange(len(encoded)).repeat_interleave(torch.tensor(num_candidates))
        num_contexts = max(len({ids[:-1] for ids in example.sequences}) for example in encoded)
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

        if are_together:
            rows = _rows_by_example(encoded)
            sums = self._spread(rows, 1, score, self.batch_size // num_contexts)
        else:
            sequences = [example.sequences[number] for example, number in candidates]
            sums = self._spread(_rows_by_context(sequences), 1, score)
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

        rows = _rows_by_length([len(ids) for ids in self.split.prompts])
        return self._spread(rows, width, write).long()

    @cached_property
    def _candidate_scores(self) -> Tensor:
        """The mean log-probability of each candidate's tokens, float64 [examples, most candidates].

        It is filled with -inf.
        """
        pairs = zip(self.log_probabilities, self.split.encoded, strict=True)
        means = [total / torch.tensor(example.option_lengths) for total, example in pairs]
        return pad_sequence(means, batch_first=True, padding_value=float("-inf"))

    @cached_property
    def _token_scores(self) -> Tensor:
        """The summed loss of each conversation, and its right tokens, float64 [2, examples]."""
        encoded = self.split.encoded

        def score(items: Sequence[int]) -> Tensor:
            examples = [encoded[item] for item in items]
            batch = teacher_forcing_batch(examples, self.reader.tokenizer.pad_id).with_logits()
            batch, logits = self._forward(batch)
            return torch.stack(
                [teacher_forcing_loss(logits, batch), count_right_tokens(logits, batch)], dim=1
            )

        rows = _rows_by_length([example.num_tokens for example in encoded])
        return self._spread(rows, 2, score).T

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
            return torch.cat([judges.loss_of(scores).unsqueeze(1), scores], dim=1)

        rows = _rows_by_length([example.num_tokens for example in self.split.encoded])
        return self._spread(rows, width, run)

    def _mean(self, losses: Tensor) -> float:
        """Return the mean of the objective from its sum over each example, float64 [examples].

        With `Reader.loss_batch`, it is the mean over batches, each of which counts by its number of
        examples, as transformers' Trainer averages.
        """
        count = self.reader.objective.num_terms
        num_terms = torch.tensor([count(example) for example in self.split.encoded])
        size = self.reader.loss_batch
        if size is None:
            return float(losses.sum() / num_terms.sum())
        total = 0.0
        for batch, batch_terms in zip(
            torch.split(losses, size), torch.split(num_terms, size), strict=True
        ):
            total += len(batch) * float(batch.sum() / batch_terms.sum())
        return total / len(losses)

    @cached_property
    def _takes_packed(self) -> bool:
        """Whether sequences may share rows."""
        # Of a model with a trained prefix, the attention is no longer one that takes packed rows.
        return can_pack(self.engine.module.config, self.reader.data.max_length)

    def _forward(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor]:
        """Return a batch on this rank's device, and its outputs."""
        outputs = self.engine.forward(self._laid_out(batch))
        return to_device(batch, distributed.device()), outputs

    def _laid_out(self, batch: MicroBatch) -> MicroBatch:
        """Return a batch as it runs: with sequences that share rows, if they may."""
        return pack(batch, self.split.num_start) if self._takes_packed else batch

    def _spread(
        self,
        rows: Sequence[list[int]],
        width: int,
        run: Callable[[Sequence[int]], Tensor],
        batch_size: int | None = None,
    ) -> Tensor:
        """Run items on all ranks, in batches of `batch_size` rows (see the module's docstring).

        Args:
            rows: the items, by number from 0, that share each row of a batch.
            width: number of values of an item.
            run: the collective (items of a batch) -> values, [items, width].
            batch_size: another than that of the evaluation.

        Returns:
            float64 [all items, width], the same on every rank.
        """
        size = batch_size or self.batch_size
        batches = [
            list(chain.from_iterable(rows[begin : begin + size]))
            for begin in range(0, len(rows), size)
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
        return distributed.sum_tensor(values.to(distributed.device())).cpu()


def _rows_by_context(sequences: Sequence[TokenIds]) -> list[list[int]]:
    """Return the items that share each row of a batch of candidates, in order of length.

    Sequences that differ in their last token only are neighbors in this order.
    """
    order = sorted(range(len(sequences)), key=lambda item: (len(sequences[item]), sequences[item]))
    return [list(items) for _, items in groupby(order, key=lambda item: sequences[item][:-1])]


def _rows_by_example(encoded: Sequence[EncodedExample]) -> list[list[int]]:
    """Return the items of each example, its candidates, in order of the length of examples."""
    items = iter(range(sum(len(example.sequences) for example in encoded)))
    rows = [
        (example.num_tokens, list(islice(items, len(example.sequences)))) for example in encoded
    ]
    return [row for _, row in sorted(rows)]


def _rows_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return a row for each item, in order of length."""
    return [[item] for item in sorted(range(len(lengths)), key=lambda item: lengths[item])]
