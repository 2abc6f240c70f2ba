"""What identifies a model's parameters on any number of ranks: names, ids, a hash of all names.

Noise is a function of (key, parameter id, element), and the journal's header has the hash of all
names and shapes. So all of these are functions of the unsharded model alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping


def own_name(module_name: str) -> str:
    """Return a parameter's own name, given its name in the module tree.

    peft puts a module around the model's own, which it calls base_layer, and calls the adapter
    default.
    """
    return module_name.replace(".base_layer.", ".").replace(".default.", ".")


def parameter_ids(names: Iterable[str]) -> dict[str, int]:
    """Return a distinct 32-bit id for each parameter name, which selects its stream of noise.

    An id is a hash of the name. Of two names with the same hash, the later one is hashed again.
    """
    names_by_id: dict[int, str] = {}
    for name in sorted(names):
        candidate = _hash32(name)
        attempt = 0
        while candidate in names_by_id:
            attempt += 1
            candidate = _hash32(f"{name}#{attempt}")
        names_by_id[candidate] = name
    return {name: parameter_id for parameter_id, name in names_by_id.items()}


def _hash32(name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def table_hash(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return a hash of all names and shapes, 32 hex digits.

    Models with the same hash get the same noise.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(shapes):
        shape = list(shapes[name])
        digest.update(f"{name}{shape};".encode())
    return digest.hexdigest()
