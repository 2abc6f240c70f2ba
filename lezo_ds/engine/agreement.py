"""Proof, at every step, that all ranks work on the same thing.

Ranks exchange nothing but scalars (LeZO, Algorithm 1), so one that had another batch, another seed or another
projected gradient would train another model without any error. Each rank states what it works on; a hash of
that goes with the losses: numbers whose sums over the ranks tell whether all ranks gave the same ones.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from lezo_ds.errors import DesyncError
from lezo_ds.model.batch import MicroBatch

Facts = Mapping[str, str]
"""What a rank works on at a step, by what it is called in messages."""

_PART_BITS = 20
_MOST_SHOWN = 4


def fact_numbers(facts: Facts) -> list[float]:
    """Return parts of a hash of facts, and their squares: whole numbers whose sums float64 holds.

    Returns:
        `step_plan.NUM_FACT_NUMBERS` numbers below 2**40; `all_agree` reads their sums over up to 8192 ranks.
    """
    digest = int.from_bytes(hashlib.blake2b(repr(dict(facts)).encode(), digest_size=8).digest(), "little")
    parts = [digest >> shift & (1 << _PART_BITS) - 1 for shift in (0, _PART_BITS)]
    return [float(number) for part in parts for number in (part, part * part)]


def all_agree(sums: Sequence[float], num_ranks: int) -> bool:
    """Return whether all ranks gave the same `fact_numbers`.

    n (x1**2 + ... + xn**2) = (x1 + ... + xn)**2 only where all x are equal (Cauchy and Schwarz).

    Args:
        sums: of the ranks' `fact_numbers`.
        num_ranks: that were added up, up to 8192.
    """
    numbers, squares = map(int, sums[::2]), map(int, sums[1::2])
    return all(num_ranks * square == number * number for number, square in zip(numbers, squares, strict=True))


def batch_digest(batch: Sequence[MicroBatch]) -> str:
    """Return a hash of all that a step's micro-batches hold as tensors, and of their weights."""
    digest = hashlib.blake2b(digest_size=8)
    for micro_batch in batch:
        digest.update(repr(micro_batch.weight).encode())
        for tensors in (micro_batch.inputs, micro_batch.labels):
            for name, tensor in tensors.items():
                digest.update(f"{name}{tuple(tensor.shape)}".encode())
                digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def disagreement(step: int, by_rank: Sequence[Facts], num_good: int) -> DesyncError:
    """Return the error that says which ranks differ from most (of two halves, from rank 0's), and in what.

    Args:
        step: at which they did.
        by_rank: every rank's facts, of equal names; not all equal.
        num_good: number of steps on which they agree.
    """
    found = []
    for name in by_rank[0]:
        values = [facts[name] for facts in by_rank]
        common = Counter(values).most_common(1)[0][0]  # the first counted, of equally many
        found += [
            f"rank {rank} has another {name}, {value}, than {common}"
            for rank, value in enumerate(values)
            if value != common
        ]
    what = f"the ranks do not work on the same thing at step {step}"
    return _desync_error(what, found, num_good, "give all ranks the same recipe, data and code")


def wrong_weights(step: int, found: Sequence[str], num_good: int) -> DesyncError:
    """Return the error that says which weights of which ranks are not the run's after `step` steps.

    Args:
        step: how many steps there have been.
        found: what is wrong, and where.
        num_good: number of steps after which the weights were right when they were last checked.
    """
    what = f"weights are not what {step} steps made of them"
    return _desync_error(what, found, num_good, "test the memory of that rank's machine")


def _desync_error(what: str, found: Sequence[str], num_good: int, fix: str) -> DesyncError:
    more = f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    return DesyncError(
        f"{what}; got: {'; '.join(found[:_MOST_SHOWN])}{more}; "
        f"last good step: {num_good - 1 if num_good else 'none'}, later ones are done again; "
        f"fix: run the same command again; if it happens again, {fix}"
    )
