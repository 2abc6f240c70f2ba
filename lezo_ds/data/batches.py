"""Batches: which examples a step draws, and their layout (the sequences to run and the logits to read)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lezo_ds.data.encoding import EncodedExample
from lezo_ds.forward.batch import LogitSelection, MicroBatch

PAD_MULTIPLE = 8  # MeZO's value; tensor cores are fastest on multiples of 8


def batch_indices(seed: int, step: int, num_examples: int, batch_size: int) -> list[int]:
    """Return the indices of the examples of a step (from 0), as a pure function of the arguments.

    Examples come from an endless stream: one permutation of all examples for each epoch.
    """
    first = step * batch_size
    stream = (divmod(position, num_examples) for position in range(first, first + batch_size))
    return [int(_permutation(seed, epoch, num_examples)[position]) for epoch, position in stream]


@lru_cache(
    maxsize=2
)  # a step reads at most two epochs, unless a batch is larger than the training set
def _permutation(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    # NumPy guarantees the raw words of Philox4x64 (Salmon et al. 2011) across versions, but not the result
    # of Generator.permutation. Sorting the words gives a permutation that never changes.
    words = np.random.Philox(key=seed + (epoch << 64)).random_raw(num_examples)
    return np.argsort(words, kind="stable")


def candidate_batch(
    examples: Sequence[EncodedExample], pad_id: int, *, deduplicate: bool = True
) -> MicroBatch:
    """Lay out every candidate of every labeled example, to train a classification task.

    If all E examples have the same candidates, each of one token, each example is one row: its context. The
    batch then selects the candidates' logits [E, C] only, because the rest of the vocabulary cancels in any
    comparison of candidates. Otherwise, or without `deduplicate`, each candidate is a row, and the batch
    selects the logits over the whole vocabulary that predict its tokens. The last token is never fed.

    The label "label" is int64 [E]. The second layout adds "target_ids" int64 [tokens]; "token_slots" int64
    [rows, longest candidate], the logits of each candidate; and "candidate_slots" int64 [E, most candidates],
    the rows of each example; filled with -1.
    """
    vocabulary = _shared_candidates(examples) if deduplicate else None
    labels = {"label": torch.tensor([example.gold for example in examples])}
    if vocabulary is not None:
        contexts = [example.sequences[0][:-1] for example in examples]
        selection = LogitSelection(
            rows=torch.arange(len(contexts)),
            positions=torch.tensor([len(context) - 1 for context in contexts]),
            vocabulary=torch.tensor(vocabulary),
        )
        return MicroBatch(
            {"input_ids": _pad(contexts, pad_id)}, len(examples), labels, selection=selection
        )
    sequences = [ids for example in examples for ids in example.sequences]
    targets = [
        example.targets(place) for example in examples for place in range(len(example.sequences))
    ]
    labels["candidate_slots"] = _slots([len(example.sequences) for example in examples])
    batch = _token_batch(sequences, targets, pad_id)
    return replace(batch, weight=len(examples), labels={**batch.labels, **labels})


def teacher_forcing_batch(examples: Sequence[EncodedExample], pad_id: int) -> MicroBatch:
    """Lay out the gold candidate of every example, to train on its tokens; the weight is their number."""
    sequences = [example.sequences[example.gold] for example in examples]
    targets = [example.targets(example.gold) for example in examples]
    return _token_batch(sequences, targets, pad_id)


def scoring_batch(
    sequences: Sequence[tuple[int, ...]], lengths: Sequence[int], pad_id: int
) -> MicroBatch:
    """Lay out sequences to score the last `lengths` tokens of each. Those that are fed alike share a row."""
    pairs = zip(sequences, lengths, strict=True)
    targets = [range(len(ids) - length, len(ids)) for ids, length in pairs]
    return _token_batch(sequences, targets, pad_id, share_rows=True)


def _shared_candidates(examples: Sequence[EncodedExample]) -> list[int] | None:
    """Return the token ids of the candidates if one row per example is enough, else None."""
    candidates = [ids[-1] for ids in examples[0].sequences]
    for example in examples:
        contexts = {ids[:-1] for ids in example.sequences}
        one_token_each = set(example.option_lengths) == {1} and len(contexts) == 1
        if not one_token_each or [ids[-1] for ids in example.sequences] != candidates:
            return None
    return candidates


def _token_batch(
    sequences: Sequence[tuple[int, ...]],
    targets: Sequence[Sequence[int]],
    pad_id: int,
    *,
    share_rows: bool = False,
) -> MicroBatch:
    """Feed each sequence without its last token; select the logits that predict the tokens at its targets."""
    fed = [ids[:-1] for ids in sequences]
    row_of: Sequence[int] = range(len(fed))
    if share_rows:
        distinct = {ids: row for row, ids in enumerate(dict.fromkeys(fed))}
        fed, row_of = list(distinct), [distinct[ids] for ids in fed]
    rows = [row for row, places in zip(row_of, targets, strict=True) for _ in places]
    positions = [place - 1 for places in targets for place in places]
    target_ids = [
        ids[place] for ids, places in zip(sequences, targets, strict=True) for place in places
    ]
    token_slots = _slots([len(places) for places in targets])
    return MicroBatch(
        inputs={"input_ids": _pad(fed, pad_id)},
        weight=len(target_ids),
        labels={"target_ids": torch.tensor(target_ids), "token_slots": token_slots},
        selection=LogitSelection(torch.tensor(rows), torch.tensor(positions)),
    )


def _pad(sequences: Sequence[tuple[int, ...]], pad_id: int) -> Tensor:
    width = -(-max(map(len, sequences)) // PAD_MULTIPLE) * PAD_MULTIPLE
    return torch.tensor([[*ids, *[pad_id] * (width - len(ids))] for ids in sequences])


def _slots(counts: Sequence[int]) -> Tensor:
    """Assign consecutive items to groups: [2, 1] gives [[0, 1], [2, -1]], int64 [groups, max count]."""
    length = torch.tensor(counts).unsqueeze(1)
    column = torch.arange(int(length.max()))
    return torch.where(column < length, length.cumsum(0) - length + column, -1)
