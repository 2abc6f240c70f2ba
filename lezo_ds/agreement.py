"""A proof at every step that all ranks work on the same step, batch, plan and settings.

Ranks exchange only scalars (LeZO, Algorithm 1). A rank with another batch, seed or projected gradient would
therefore train another model without any error. Each rank states the facts of its work, and a hash of the
facts goes into the all-reduce of the losses. The sums of the hash numbers show whether all hashes are equal.

No rank lays out the whole batch. All ranks state what it consists of. Each share of it is laid out and hashed
by two ranks, the one that runs it and another one: one adds the hash, the other subtracts it, and the sum
shows whether they agree. At the next step it is another pair, so any two ranks meet.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from lezo_ds.errors import DesyncError
from lezo_ds.forward.batch import MicroBatch, StepBatch

Facts = Mapping[str, str]
"""What a rank works on at a step, by the names that error messages use."""

BATCH = "batch"
NUM_PROOF_NUMBERS = 5
"""Numbers of the all-reduce that prove agreement: `share_number` and four `fact_numbers`."""

_PART_BITS = 20
_SHARE_BITS = 40  # float64 holds the sum of such numbers of 8192 ranks exactly
_MOST_SHOWN = 4


def fact_numbers(facts: Facts) -> list[float]:
    """Return the parts of a hash of the facts, and their squares: four integers below 2**40."""
    digest = int.from_bytes(
        hashlib.blake2b(repr(dict(facts)).encode(), digest_size=8).digest(), "little"
    )
    parts = [digest >> shift & (1 << _PART_BITS) - 1 for shift in (0, _PART_BITS)]
    return [float(number) for part in parts for number in (part, part * part)]


def all_agree(sums: Sequence[float], num_ranks: int) -> bool:
    """Return whether the sums of `fact_numbers` over at most 8192 ranks are those of equal facts.

    By the Cauchy-Schwarz inequality, n (x1**2 + ... + xn**2) = (x1 + ... + xn)**2 only if all x are equal.
    """
    numbers, squares = map(int, sums[::2]), map(int, sums[1::2])
    return all(
        num_ranks * square == number * number
        for number, square in zip(numbers, squares, strict=True)
    )


def batch_facts(batch: StepBatch) -> dict[str, str]:
    """Return what a rank can state of a step's batch without laying it out."""
    digest = hashlib.blake2b(batch.content, digest_size=8)
    digest.update(repr(list(batch.weights)).encode())
    return {BATCH: digest.hexdigest()}


def watched_rank(rank: int, num_ranks: int, step: int) -> int:
    """Return the rank whose share of the batch this rank hashes, too. Each rank is watched by one other.

    >>> [[watched_rank(rank, 3, step) for rank in range(3)] for step in range(2)]
    [[1, 2, 0], [2, 0, 1]]
    """
    return (rank + 1 + step % max(1, num_ranks - 1)) % num_ranks


def share_number(batch: StepBatch, mine: Iterable[int], watched: Iterable[int]) -> float:
    """Return the hash of a rank's own micro-batches, minus that of those it watches: in (-2**40, 2**40).

    The sum over all ranks is 0 if each share has the same hash on both of its ranks.
    """

    def number(share: Iterable[int]) -> int:
        return int(batch_digest([batch[index] for index in share]), 16) >> 64 - _SHARE_BITS

    return float(number(mine) - number(watched))


def batch_digest(batch: Iterable[MicroBatch]) -> str:
    """Return a hash of all tensors in micro-batches and of the weights of the micro-batches."""
    digest = hashlib.blake2b(digest_size=8)
    for micro_batch in batch:
        digest.update(repr(micro_batch.weight).encode())
        selection = vars(micro_batch.selection) if micro_batch.selection is not None else {}
        for tensors in (micro_batch.inputs, micro_batch.labels, selection):
            for name, tensor in tensors.items():
                if tensor is not None:
                    digest.update(f"{name}{tuple(tensor.shape)}".encode())
                    digest.update(
                        tensor.detach()
                        .cpu()
                        .contiguous()
                        .view(-1)
                        .view(torch.uint8)
                        .numpy()
                        .tobytes()
                    )
    return digest.hexdigest()


def disagreement(step: int, by_rank: Sequence[Facts], num_good: int) -> DesyncError:
    """Return the error that names each rank whose facts differ from those of most ranks.

    If two values are equally common, the one of the lowest rank counts as right.
    """
    differences = []
    for name in by_rank[0]:
        values = [facts[name] for facts in by_rank]
        common = Counter(values).most_common(1)[0][0]  # on a tie, the first that was counted
        differences += [
            f"rank {rank} has another {name}: {value}, but most ranks have {common}"
            for rank, value in enumerate(values)
            if value != common
        ]
    what = f"the ranks do not work on the same thing at step {step}"
    return desync_error(
        what, differences, num_good, fix="give all ranks the same recipe, data and code"
    )


def desync_error(what: str, details: Sequence[str], num_good: int, fix: str) -> DesyncError:
    """Return the error for ranks that differ after `num_good` good steps."""
    more = f"; and {len(details) - _MOST_SHOWN} more" if len(details) > _MOST_SHOWN else ""
    return DesyncError(
        f"{what}: {'; '.join(details[:_MOST_SHOWN])}{more}; "
        f"last good step: {num_good - 1 if num_good else 'none'}, later steps will be done again; "
        f"fix: run the same command again; if it happens again, {fix}"
    )
