"""A proof at every step that all ranks work on the same step, batch, plan and settings.

Ranks exchange only scalars (LeZO, Algorithm 1). A rank with another batch, seed or projected gradient would
therefore train another model without any error. Each rank states the facts of its work, and a hash of the
facts goes into the all-reduce of the losses. The sums of the hash numbers show whether all hashes are equal.

No rank lays out the whole batch. All ranks state what it is made of. Each share of it is laid out and hashed
by two ranks, the one that runs it and another one: one adds the hash, the other subtracts it, and the sum
shows whether they agree. At the next step it is another pair, so any two ranks meet.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lezo_ds.errors import DesyncError
from lezo_ds.forward.batch import MicroBatch
from lezo_ds.forward.step_batch import StepBatch

Facts = Mapping[str, str]
"""What a rank works on at a step, by the names that error messages use."""

BATCH = "batch"

_PART_BITS = 20
_SHARE_BITS = 40  # float64 holds the sum of such numbers of 8192 ranks exactly
_MOST_SHOWN = 4


def fact_numbers(facts: Facts) -> list[float]:
    """Return the parts of a hash of the facts, and their squares.

    Returns:
        `step_plan.NUM_FACT_NUMBERS` whole numbers below 2**40. float64 holds their sums over up to 8192 ranks
        exactly, and `all_agree` reads these sums.
    """
    digest = int.from_bytes(hashlib.blake2b(repr(dict(facts)).encode(), digest_size=8).digest(), "little")
    parts = [digest >> shift & (1 << _PART_BITS) - 1 for shift in (0, _PART_BITS)]
    return [float(number) for part in parts for number in (part, part * part)]


def all_agree(sums: Sequence[float], num_ranks: int) -> bool:
    """Return whether all ranks gave the same `fact_numbers`.

    By the Cauchy-Schwarz inequality, n (x1**2 + ... + xn**2) = (x1 + ... + xn)**2 only if all x are equal.

    Args:
        sums: sums of `fact_numbers` over the ranks.
        num_ranks: number of ranks, at most 8192.
    """
    numbers, squares = map(int, sums[::2]), map(int, sums[1::2])
    return all(num_ranks * square == number * number for number, square in zip(numbers, squares, strict=True))


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
    """Return the hash of a rank's own share of a batch, minus that of the share that it watches.

    Args:
        batch: of the step.
        mine: indices of the micro-batches in this rank's share.
        watched: those in the share of its `watched_rank`.

    Returns:
        A whole number in (-2**40, 2**40). The sum over all ranks is 0 if each share has the same hash on both
        of its ranks.
    """

    def number(share: Iterable[int]) -> int:
        return int(batch_digest([batch[index] for index in share]), 16) >> 64 - _SHARE_BITS

    return float(number(mine) - number(watched))


def batch_digest(batch: Iterable[MicroBatch]) -> str:
    """Return a hash of all tensors in micro-batches and of the weights of the micro-batches."""
    digest = hashlib.blake2b(digest_size=8)
    for micro_batch in batch:
        digest.update(repr(micro_batch.weight).encode())
        for tensors in (micro_batch.inputs, micro_batch.labels, _selected(micro_batch)):
            for name, tensor in tensors.items():
                digest.update(f"{name}{tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _selected(micro_batch: MicroBatch) -> Mapping[str, Tensor]:
    found = vars(micro_batch.selection) if micro_batch.selection is not None else {}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def disagreement(step: int, by_rank: Sequence[Facts], num_good: int) -> DesyncError:
    """Return the error that names each rank whose facts differ from those of most ranks.

    If two values are equally common, the one of the lowest rank counts as right.

    Args:
        step: index of the step at which the ranks differ.
        by_rank: facts of every rank, with the same names but not all with the same values.
        num_good: number of steps on which all ranks agree.
    """
    found = []
    for name in by_rank[0]:
        values = [facts[name] for facts in by_rank]
        common = Counter(values).most_common(1)[0][0]  # on a tie, the first that was counted
        found += [
            f"rank {rank} has another {name}: {value}, but most ranks have {common}"
            for rank, value in enumerate(values)
            if value != common
        ]
    what = f"the ranks do not work on the same thing at step {step}"
    return _desync_error(what, found, num_good=num_good, fix="give all ranks the same recipe, data and code")


def wrong_weights(step: int, found: Sequence[str], num_good: int) -> DesyncError:
    """Return the error that says which weights of which ranks are wrong.

    Args:
        step: number of steps done.
        found: what is wrong, and where.
        num_good: number of steps at the last check that found all weights right.
    """
    what = f"the weights are not what {step} steps made of them"
    return _desync_error(what, found, num_good=num_good, fix="test the memory of that rank's machine")


def _desync_error(what: str, found: Sequence[str], num_good: int, fix: str) -> DesyncError:
    more = f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return DesyncError(
        f"{what}; got: {'; '.join(found[:_MOST_SHOWN])}{more}; "
        f"last good step: {num_good - 1 if num_good else 'none'}, later steps will be done again; "
        f"fix: run the same command again; if it happens again, {fix}"
    )
