"""Names and ids of a model's parameters. They are the same for any sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class NamedParameter:
    """A parameter's identity.

    Attributes:
        name: its name in the unsharded model.
        parameter_id: 32-bit id that selects its stream of noise.
        block: index of its transformer block. None if it is outside all blocks.
    """

    name: str
    parameter_id: int
    block: int | None


def parameter_ids(names: Iterable[str]) -> dict[str, int]:
    """Return a distinct 32-bit id for each parameter name.

    An id is a hash of the name. If two names have the same hash, the later one in sorted order is hashed
    again. Ids do not depend on the order of the names, on the number of ranks, or on the dropped layers.
    """
    ids: dict[str, int] = {}
    taken: set[int] = set()
    for name in sorted(names):
        attempt = 0
        while (candidate := _hash32(f"{name}#{attempt}" if attempt else name)) in taken:
            attempt += 1
        ids[name] = candidate
        taken.add(candidate)
    return ids


def _hash32(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def table_hash(shapes: dict[str, tuple[int, ...]]) -> str:
    """Return a hash of all parameter names and shapes: 32 hex digits.

    Two models with the same hash get the same noise.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(shapes):
        digest.update(f"{name}{list(shapes[name])};".encode())
    return digest.hexdigest()
