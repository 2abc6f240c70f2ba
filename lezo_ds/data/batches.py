"""Batches: which examples a step draws, and how they lie in the tensors that the model runs.

A model predicts token i + 1 from the tokens up to i. To score the last tokens of a sequence, a
batch feeds the sequence without its last token, and selects the logits before each token that
counts:

    sequence       <s>  It  was  so   good            the candidate is "so good"
    fed            <s>  It  was  so                   one row of input_ids, padded on the right
    selected                 |    |
    target ids              so   good                 what these two logits should predict

The selected logits are one table, [tokens, vocabulary], for all sequences of the batch. "Slots" say
which of its rows belong together: row i of `token_slots` lists the rows of the table that belong to
sequence i, and row e of `candidate_slots` lists the sequences of example e. Both are filled with
-1.

    token_slots      [[ 0,  1],       sequence 0 has the logits 0 and 1
                      [ 2, -1]]       sequence 1 has the logits 2

Padding is on the right. Causal attention never looks there, so no attention mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from lezo_ds.data.examples import EncodedExample, TokenIds
from lezo_ds.forward.batch import LogitSelection, MicroBatch

Candidate = tuple[EncodedExample, int]
"""An example, and the number of one of its candidates."""

PAD_MULTIPLE = 8
"""Rows are as wide as a multiple of it. The value is MeZO's; tensor cores are fastest there."""


def batch_indices(seed: int, step: int, num_examples: int, batch_size: int) -> list[int]:
    """Return the indices of the examples of a step (from 0), as a pure function of the arguments.

    Examples come from an endless stream, which has one permutation of all examples for each epoch.
    """
    indices = []
    for number in range(step * batch_size, (step + 1) * batch_size):
        epoch, position = divmod(number, num_examples)
        indices.append(int(_permutation(seed, epoch, num_examples)[position]))
    return indices


@lru_cache(maxsize=2)  # a step reads two epochs at most, unless the batch is larger than the data
def _permutation(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    # NumPy guarantees the raw words of Philox4x64 (Salmon et al. 2011) across versions, but not the
    # result of Generator.permutation. Sorting the words gives a permutation that never changes.
    words = np.random.Philox(key=seed + (epoch << 64)).random_raw(num_examples)
    return np.argsort(words, kind="stable")


def candidate_batch(
    examples: Sequence[EncodedExample], pad_id: int, *, deduplicate: bool = True
) -> MicroBatch:
    """Lay out every candidate of every labeled example, to train a classification task.

    If all E examples have the same C candidates, and each is one token, an example is one row: its
    context. The batch selects one row of logits for it, of the candidates alone, because the rest
    of the vocabulary cancels in any comparison of candidates:

        row 0   <s> a fine film . It was pad      selected: position 6, tokens [great, terrible]
        row 1   <s> dull . It was pad pad pad     selected: position 4, tokens [great, terrible]

    Otherwise, each candidate is a row, and the logits are those of the whole vocabulary:

        row 0   <s> a fine film . It was so       selected: positions 6 and 7 (of "so good")
        row 1   <s> a fine film . It was pad      selected: position 6        (of "bad")

    Args:
        examples: examples with labels.
        pad_id: token that fills rows.
        deduplicate: whether the first layout may be used.

    Returns:
        A batch of weight E. Its labels are "label", int64 [E], and in the second layout
        those of `token_batch` and "candidate_slots", int64 [E, most candidates].
    """
    vocabulary = shared_candidates(examples) if deduplicate else None
    labels = {"label": torch.tensor([example.gold for example in examples])}
    if vocabulary is not None:
        contexts = [example.sequences[0][:-1] for example in examples]
        selection = LogitSelection(
            rows=torch.arange(len(contexts)),
            positions=torch.tensor([len(context) - 1 for context in contexts]),
            vocabulary=torch.tensor(vocabulary),
        )
        inputs = {"input_ids": _pad(contexts, pad_id)}
        return MicroBatch(inputs, len(examples), labels, selection=selection)
    batch = token_batch(all_candidates(examples), pad_id)
    labels |= batch.labels
    counts = [len(example.sequences) for example in examples]
    labels["candidate_slots"] = _slots(counts)
    example_of_row = torch.arange(len(examples)).repeat_interleave(torch.tensor(counts))
    return replace(
        batch, weight=len(examples), labels=labels, token_examples=example_of_row[:, None]
    )


def teacher_forcing_batch(examples: Sequence[EncodedExample], pad_id: int) -> MicroBatch:
    """Lay out the gold candidate of every example, to train on its tokens (see `token_batch`)."""
    return token_batch([(example, example.gold) for example in examples], pad_id)


def all_candidates(examples: Sequence[EncodedExample]) -> list[Candidate]:
    """Return the candidates of each example, in order."""
    candidates = []
    for example in examples:
        candidates += [(example, number) for number in range(len(example.sequences))]
    return candidates


def shared_candidates(examples: Sequence[EncodedExample]) -> list[int] | None:
    """Return the token ids of the candidates if one row an example is enough, else None."""
    candidates = [ids[-1] for ids in examples[0].sequences]
    for example in examples:
        context = example.sequences[0][:-1]
        expected = [(*context, candidate) for candidate in candidates]
        are_tokens = all(length == 1 for length in example.option_lengths)
        if not are_tokens or list(example.sequences) != expected:
            return None
    return candidates


def token_batch(
    candidates: Sequence[Candidate], pad_id: int, *, share_rows: bool = False
) -> MicroBatch:
    """Return a batch that selects the logits before the tokens that belong to candidates.

    Args:
        candidates: an example and the number of the candidate, for each sequence.
        pad_id: token that fills rows.
        share_rows: whether sequences that are fed alike, because they differ in their last token
            only, are one row of input_ids.

    Returns:
        A batch whose weight is the number of these tokens, and which selects the log-probability
        of each. Its labels are "target_ids", int64 [tokens], and "token_slots",
        int64 [candidates, longest candidate].
    """
    fed: list[TokenIds] = []
    row_of: dict[TokenIds, int] = {}
    rows = []
    positions = []
    target_ids = []
    for example, number in candidates:
        ids = example.sequences[number]
        context = ids[:-1]
        if not share_rows or context not in row_of:
            row_of[context] = len(fed)
            fed.append(context)
        for position in example.targets(number):
            rows.append(row_of[context])
            positions.append(position - 1)
            target_ids.append(ids[position])
    token_slots = _slots([len(example.targets(number)) for example, number in candidates])
    targets = torch.tensor(target_ids)
    return MicroBatch(
        {"input_ids": _pad(fed, pad_id)},
        len(target_ids),
        {"target_ids": targets, "token_slots": token_slots},
        LogitSelection(torch.tensor(rows), torch.tensor(positions), targets=targets),
    )


def _pad(sequences: Sequence[TokenIds], pad_id: int) -> Tensor:
    """Return sequences as rows, int64 [sequences, a multiple of PAD_MULTIPLE]."""
    rows = [torch.tensor(ids, dtype=torch.int64) for ids in sequences]
    padded = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    num_more = -padded.shape[1] % PAD_MULTIPLE
    return F.pad(padded, (0, num_more), value=pad_id)


def _slots(counts: Sequence[int]) -> Tensor:
    """Assign items to groups in order: [2, 1] gives [[0, 1], [2, -1]], int64 [groups, longest]."""
    items = torch.split(torch.arange(sum(counts)), list(counts))
    return pad_sequence(list(items), batch_first=True, padding_value=-1)
