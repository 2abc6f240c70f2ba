"""Digests of weights, and the ids and hashes of parameters, which are the same for any sharding."""

import itertools
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lezo_ds.noise import Elements, Region
from lezo_ds.sharding import parameters, weights
from lezo_ds.sharding.parameters import parameter_ids, table_hash
from lezo_ds.sharding.weights import digest_of

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
DTYPES = st.sampled_from([*BITS, torch.int16])
PATTERNS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=60)
STARTS = st.integers(0, 2**40)
PARAMETER_IDS = st.integers(0, 2**32 - 1)


def wrapped(value):
    """Return an integer as a signed 64-bit one."""
    return (value + 2**63) % 2**64 - 2**63


def shard_digest(values, start, parameter_id):
    region = Region.run(start, values.numel())
    return digest_of(values, Elements(parameter_id, values.shape, region))


def reference_digest(values, start, parameter_id):
    """The definition, in Python's unbounded integers."""
    total = 0
    stored = values.view(BITS.get(values.dtype, values.dtype)).tolist()
    for index, bits in enumerate(stored, start + 1):
        of_parameter = parameter_id * (0xC2B2AE3D27D4EB4F - 2**64) % 2**63
        key = wrapped(index * 0x9E3779B97F4A7C15 + of_parameter)
        total += bits * ((key ^ (key >> 31)) * 0xBF58476D1CE4E5B9 | 1)
    return wrapped(total)


@settings(deadline=None)
@given(PATTERNS, st.lists(st.integers(0, 60)), DTYPES, STARTS, PARAMETER_IDS)
def test_digests_are_those_defined_and_slices_add_up(patterns, cuts, dtype, start, parameter_id):
    # The low bits of each integer as a number: NaN and infinities among them.
    values = torch.tensor(patterns, dtype=torch.int64).to(BITS.get(dtype, dtype)).view(dtype)
    expected = reference_digest(values, start, parameter_id)
    assert shard_digest(values, start, parameter_id) == expected
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [
        shard_digest(values[first:last], start + first, parameter_id)
        for first, last in pairwise(edges)
    ]
    assert wrapped(sum(parts)) == expected


def test_digests_ids_and_table_hashes_are_the_recorded_ones_in_any_order(monkeypatch):
    values = torch.tensor([1.0, -2.0, 0.5, 3.0])
    for chunk in (weights._CHUNK_ON_CPU, 3):
        monkeypatch.setattr(weights, "_CHUNK_ON_CPU", chunk)
        assert shard_digest(values, 5, 77) == -3482683184599007232
    assert shard_digest(values.bfloat16(), 2**33, 2**32 - 1) == -4758718987625210304
    embedding, bias = "model.decoder.embed_tokens.weight", "model.decoder.layers.0.fc1.bias"
    assert parameter_ids([embedding, bias]) == parameter_ids([bias, embedding])
    assert parameter_ids([bias, embedding]) == {embedding: 270094208, bias: 128067829}
    for shapes in ({"a": (2, 3), "b": (4,)}, {"b": (4,), "a": (2, 3)}):
        assert table_hash(shapes) == "b4e39c3ccfb607d134e09c2f9846e467"


def test_names_with_the_same_hash_get_different_ids_in_any_order():
    names_by_hash = {}
    for index in itertools.count():  # two of about 80,000 names have the same hash
        name = f"layers.{index}.weight"
        other = names_by_hash.setdefault(parameters._hash32(name), name)
        if other != name:
            break
    ids = parameter_ids([name, other, "third"])
    assert len(set(ids.values())) == 3
    assert ids == parameter_ids(["third", other, name])
    first = min(name, other)
    assert ids[first] == parameter_ids([first])[first]
