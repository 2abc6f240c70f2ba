"""Encoded examples as micro-batches: which sequences run, and which of their logits are read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lezo_ds.data.encoding import EncodedExample
from lezo_ds.model.batch import LogitSelection, MicroBatch

PAD_MULTIPLE = 8  # row lengths that matrix units like; also MeZO's


def candidate_batch(
    examples: Sequence[EncodedExample], pad_id: int, *, deduplicate: bool = True
) -> MicroBatch:
    """Lay out every candidate of every example, to train a classification or to score.

    Where all examples share their candidates and each is one token behind the same context, an
    example is one row, its context, and the logits wanted are the candidates' [E, C]: the rest of
    the vocabulary cancels in any comparison of candidates. Otherwise every candidate is a row, and
    the logits wanted are those that predict its tokens, over the whole vocabulary. The last token of
    a sequence is never fed: nothing is read behind it.

    Args:
        examples: E of them, at least 1; the number of candidates may differ between them.
        pad_id: fills rows on the right, to a multiple of 8.
        deduplicate: False keeps the second layout always.

    Returns:
        A batch of weight E. Its labels: "label" int64 [E], if all are known, and in the second
        layout, with N candidate tokens, S rows, at most T tokens a candidate and C candidates an example,
        "target_ids" int64 [N]; "token_slots" int64 [S, T], the logit rows of each candidate, and
        "candidate_slots" int64 [E, C], the rows of each example, both ending in -1 where there are fewer.
    """
    vocabulary = _shared_candidates(examples) if deduplicate else None
    label = _labels(examples)
    if vocabulary is not None:
        contexts = [example.sequences[0][:-1] for example in examples]
        selection = LogitSelection(
            rows=torch.arange(len(contexts)),
            positions=torch.tensor([len(context) - 1 for context in contexts]),
            vocabulary=torch.tensor(vocabulary),
        )
        return MicroBatch({"input_ids": _pad(contexts, pad_id)}, len(examples), label, selection)
    sequences = [ids for example in examples for ids in example.sequences]
    lengths = [length for example in examples for length in example.option_lengths]
    slots = {"candidate_slots": _slots([len(example.sequences) for example in examples])}
    return _token_batch(sequences, lengths, pad_id, len(examples), label | slots)


def teacher_forcing_batch(examples: Sequence[EncodedExample], pad_id: int) -> MicroBatch:
    """Lay out the gold candidate of every example, to train on its tokens.

    Args:
        examples: E of them, at least 1, all labelled.
        pad_id: fills rows on the right, to a multiple of 8.

    Returns:
        A batch whose weight is its number of gold tokens N. Its labels: "target_ids" int64 [N] and
        "token_slots" int64 [E, T], as in `candidate_batch`.
    """
    golds = [_require_label(example) for example in examples]
    sequences = [example.sequences[gold] for example, gold in zip(examples, golds, strict=True)]
    lengths = [example.option_lengths[gold] for example, gold in zip(examples, golds, strict=True)]
    return _token_batch(sequences, lengths, pad_id, sum(lengths), {})


def scoring_batch(sequences: Sequence[tuple[int, ...]], lengths: Sequence[int], pad_id: int) -> MicroBatch:
    """Lay out sequences to score the tokens at their ends; those that differ in the last only share a row.

    Args:
        sequences: S of them, at least 1, token ids.
        lengths: of each how many tokens at the end are scored, at least 1.
        pad_id: fills rows on the right, to a multiple of 8.

    Returns:
        A batch whose weight is its number of scored tokens N. Its labels: "target_ids" int64 [N] and
        "token_slots" int64 [S, T], as in `candidate_batch`.
    """
    return _token_batch(sequences, lengths, pad_id, sum(lengths), {}, share_rows=True)


def _shared_candidates(examples: Sequence[EncodedExample]) -> list[int] | None:
    """Return the candidates' ids where one row an example will do, else None."""
    candidates = [ids[-1] for ids in examples[0].sequences]
    for example in examples:
        contexts = {ids[:-1] for ids in example.sequences}
        one_token_each = set(example.option_lengths) == {1} and len(contexts) == 1
        if not one_token_each or [ids[-1] for ids in example.sequences] != candidates:
            return None
    return candidates


def _token_batch(
    sequences: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    pad_id: int,
    weight: int,
    labels: dict[str, Tensor],
    *,
    share_rows: bool = False,
) -> MicroBatch:
    """Feed each sequence but its last token; want the logits that predict its last `length` tokens."""
    fed = [ids[:-1] for ids in sequences]
    row_of: Sequence[int] = range(len(fed))
    if share_rows:
        distinct = {ids: row for row, ids in enumerate(dict.fromkeys(fed))}
        fed, row_of = list(distinct), [distinct[ids] for ids in fed]
    rows = [row for row, length in zip(row_of, lengths, strict=True) for _ in range(length)]
    pairs = list(zip(sequences, lengths, strict=True))
    positions = [position - 1 for ids, length in pairs for position in range(len(ids) - length, len(ids))]
    targets = [target for ids, length in pairs for target in ids[-length:]]
    inputs = {"input_ids": _pad(fed, pad_id)}
    tokens = {"target_ids": torch.tensor(targets), "token_slots": _slots(lengths)}
    return MicroBatch(
        inputs, weight, labels | tokens, LogitSelection(torch.tensor(rows), torch.tensor(positions))
    )


def _pad(sequences: Sequence[tuple[int, ...]], pad_id: int) -> Tensor:
    width = -(-max(map(len, sequences)) // PAD_MULTIPLE) * PAD_MULTIPLE
    return torch.tensor([[*ids, *[pad_id] * (width - len(ids))] for ids in sequences])


def _slots(counts: Sequence[int]) -> Tensor:
    """Give consecutive items to groups in order: int64 [groups, max count], -1 where a group has fewer.

    >>> _slots([2, 1]).tolist()
    [[0, 1], [2, -1]]
    """
    length = torch.tensor(counts).unsqueeze(1)
    column = torch.arange(int(length.max()))
    return torch.where(column < length, length.cumsum(0) - length + column, -1)


def _labels(examples: Sequence[EncodedExample]) -> dict[str, Tensor]:
    labels = [example.label for example in examples if example.label is not None]
    return {"label": torch.tensor(labels, dtype=torch.int64)} if len(labels) == len(examples) else {}


def _require_label(example: EncodedExample) -> int:
    if example.label is None:
        raise ValueError("teacher forcing needs a label")
    return example.label
