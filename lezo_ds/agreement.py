"""A proof at every step that all ranks work on the same step, batch, plan and settings.

Ranks exchange only scalars (LeZO, Algorithm 1). A rank with another batch, seed or projected
gradient would therefore train another model without any error. Four numbers in the all-reduce of
the losses prove that this has not happened:

    | losses, votes | x1 | x1**2 | x2 | x2**2 |    float64, summed over all ranks

x1 and x2 are parts of a hash of the rank's claims: names and values of all that it works on.
Their sums and the sums of their squares show whether all ranks have the same hash. If not, the
ranks exchange the claims themselves, and the error names what differs on which rank.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from lezo_ds.errors import DesyncError, last_step
from lezo_ds.forward.batch import MicroBatch, StepBatch

Claims = Mapping[str, str]
"""What a rank works on at a step. Error messages use the names."""

_PART_BITS = 20
_MOST_SHOWN = 4


def claim_numbers(claims: Claims) -> list[float]:
    """Return two parts of a hash of the claims and their squares: [x1, x1**2, x2, x2**2].

    All four are integers below 2**40.
    """
    content = repr(dict(claims)).encode()
    digest = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    numbers = []
    for shift in (0, _PART_BITS):
        number = digest >> shift & (1 << _PART_BITS) - 1
        numbers += [float(number), float(number * number)]
    return numbers


def all_agree(sums: Sequence[float], num_ranks: int) -> bool:
    """Return whether the sums of `claim_numbers` over at most 8192 ranks are those of equal claims.

    By the Cauchy-Schwarz inequality, n (x1**2 + ... + xn**2) = (x1 + ... + xn)**2 only if all x are
    equal.
    """
    for number, square in zip(sums[::2], sums[1::2], strict=True):
        # Python integers: the products exceed the 53 bits that a float holds exactly.
        if num_ranks * int(square) != int(number) ** 2:
            return False
    return True


def batch_claims(batch: StepBatch) -> dict[str, str]:
    """Return what a rank can claim of a step's batch.

    Micro-batches that a run lays out follow from the indices of their examples, because all ranks
    have the same examples (`assert_same`). Others are hashed themselves.
    """
    content = batch.content
    if content is None:
        content = batch_digest(batch)
    digest = hashlib.blake2b(content, digest_size=8)
    digest.update(repr(list(batch.weights)).encode())
    return {"batch": digest.hexdigest()}


def batch_digest(batch: Iterable[MicroBatch]) -> bytes:
    """Return a hash of all tensors in micro-batches and of the weights of the micro-batches."""
    digest = hashlib.blake2b(digest_size=8)
    for micro_batch in batch:
        digest.update(repr(micro_batch.weight).encode())
        selection = vars(micro_batch.selection) if micro_batch.selection is not None else {}
        prompts = micro_batch.prompts
        keys = {} if prompts is None else {"sample_keys": prompts.sample_keys}
        for tensors in (micro_batch.inputs, micro_batch.labels, selection, keys):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                digest.update(f"{name}{tuple(tensor.shape)}".encode())
                flat = tensor.detach().cpu().contiguous().view(-1)
                digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.digest()


def assert_same(name: str, by_rank: Sequence[str]) -> None:
    """Raise DesyncError unless all ranks have the same value of something before the first step."""
    if len(set(by_rank)) > 1:
        raise desync_error(
            "the ranks do not start from the same inputs",
            _differences(name, by_rank),
            num_good=0,
            fix="give all ranks the same recipe, data and code",
        )


def disagreement(step: int, by_rank: Sequence[Claims], num_good: int) -> DesyncError:
    """Return the error that names what differs, on which ranks, and the last good step."""
    differences: list[str] = []
    for name in by_rank[0]:
        differences += _differences(name, [claims[name] for claims in by_rank])
    return desync_error(
        f"the ranks do not work on the same thing at step {step}",
        differences,
        num_good,
        fix="give all ranks the same recipe, data and code",
    )


def _differences(name: str, values: Sequence[str]) -> list[str]:
    """Return a phrase for each rank with another value than the majority, or for each rank.

    Without a majority, as with two ranks, nobody can say which rank is wrong.
    """
    common, count = Counter(values).most_common(1)[0]
    if 2 * count > len(values):
        return [
            f"rank {rank} has another {name}: {value}, but most ranks have {common}"
            for rank, value in enumerate(values)
            if value != common
        ]
    phrases = [f"rank {rank} has {value}" for rank, value in enumerate(values)]
    phrases[0] = f"the ranks differ in {name}: {phrases[0]}"
    return phrases


def desync_error(problem: str, details: Sequence[str], num_good: int, fix: str) -> DesyncError:
    """Return the error for ranks that differ after `num_good` good steps."""
    shown = "; ".join(details[:_MOST_SHOWN])
    if len(details) > _MOST_SHOWN:
        shown += f"; and {len(details) - _MOST_SHOWN} more"
    return DesyncError(
        f"{problem}: {shown}; last good step: {last_step(num_good)}, "
        "later steps will be done again; "
        f"fix: run the same command again; if it happens again, {fix}"
    )
