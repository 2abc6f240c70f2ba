"""Digests of weights, and the ids and hashes of parameters, which are the same for any sharding."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lezo_ds.sharding import digest, parameters
from lezo_ds.sharding.digest import shard_digest
from lezo_ds.sharding.parameters import parameter_ids, table_hash

DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
PARAMETER_IDS = st.integers(0, 2**32 - 1)
STARTS = st.integers(0, 2**40)


def from_bits(patterns, dtype):
    """The low bits of each integer as a floating-point bit pattern: NaN and infinities among them."""
    integers = torch.tensor(patterns, dtype=torch.int64).to(DTYPES.get(dtype, dtype))
    return integers.view(dtype)


def reference_digest(values, start, parameter_id):
    """The definition, in Python's unbounded integers."""
    integers = values.view(DTYPES.get(values.dtype, values.dtype)).tolist()
    total = 0
    for place, bits in enumerate(integers):
        index = start + place
        key = (index + 1) * 0x9E3779B97F4A7C15 + parameter_id * (0xC2B2AE3D27D4EB4F - 2**64) % 2**63
        key = (key + 2**63) % 2**64 - 2**63  # as a signed 64-bit integer
        key = (key ^ (key >> 31)) * 0xBF58476D1CE4E5B9 | 1
        total += bits * key
    return (total + 2**63) % 2**64 - 2**63


def wrapped_sum(values):
    return (sum(values) + 2**63) % 2**64 - 2**63


PATTERNS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=60)


@settings(deadline=None)
@given(PATTERNS, st.sampled_from([*DTYPES, torch.int16]), STARTS, PARAMETER_IDS)
def test_the_digest_is_the_one_defined(patterns, dtype, start, parameter_id):
    values = from_bits(patterns, dtype)
    assert shard_digest(values, start, parameter_id) == reference_digest(values, start, parameter_id)


@settings(deadline=None)
@given(PATTERNS, st.lists(st.integers(0, 60)), st.sampled_from([*DTYPES, torch.int16]), STARTS, PARAMETER_IDS)
def test_slices_add_up_however_they_are_cut(patterns, cuts, dtype, start, parameter_id):
    values = from_bits(patterns, dtype)
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [shard_digest(values[first:last], start + first, parameter_id) for first, last in pairwise(edges)]
    assert wrapped_sum(parts) == shard_digest(values, start, parameter_id)


@settings(deadline=None)
@given(PATTERNS.filter(bool), st.data(), st.sampled_from([*DTYPES, torch.int16]), STARTS, PARAMETER_IDS)
def test_a_flip_of_any_single_bit_changes_it(patterns, data, dtype, start, parameter_id):
    values = from_bits(patterns, dtype)
    bits = values.view(DTYPES.get(dtype, dtype)).clone()
    place = data.draw(st.integers(0, len(values) - 1))
    width = 8 * bits.element_size()
    flip = 1 << data.draw(st.integers(0, width - 1))
    bits[place] ^= flip - (1 << width) if flip == 1 << (width - 1) else flip
    flipped = bits.view(dtype)
    assert shard_digest(flipped, start, parameter_id) != shard_digest(values, start, parameter_id)


def test_more_than_one_chunk_gives_the_sum_of_the_chunks(monkeypatch):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    expected = shard_digest(values, 5, 9)
    monkeypatch.setitem(digest._CHUNKS, "cpu", 64)
    assert shard_digest(values, 5, 9) == expected


@pytest.mark.parametrize(
    ("dtype", "start", "parameter_id", "expected"),
    [
        (torch.float32, 5, 77, -3482683184599007232),
        (torch.bfloat16, 2**33, 2**32 - 1, -4758718987625210304),
    ],
)
def test_digests_are_the_recorded_ones(dtype, start, parameter_id, expected):
    values = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=dtype)
    assert shard_digest(values, start, parameter_id) == expected


NAMES = [f"model.decoder.layers.{index}.{part}.weight" for index in range(48) for part in ("fc1", "fc2", "q")]


def test_ids_are_the_recorded_ones():
    ids = parameter_ids(["model.decoder.embed_tokens.weight", "model.decoder.layers.0.fc1.bias"])
    assert ids == {
        "model.decoder.embed_tokens.weight": 270094208,
        "model.decoder.layers.0.fc1.bias": 128067829,
    }


def test_ids_depend_neither_on_the_order_nor_on_the_other_names():
    shuffled = random.Random(0).sample(NAMES, len(NAMES))
    assert parameter_ids(shuffled) == parameter_ids(NAMES)
    assert parameter_ids(NAMES[:5]) == {name: parameter_ids(NAMES)[name] for name in NAMES[:5]}


def colliding_names():
    """Two names with the same 32-bit hash: by the birthday bound among about 80,000."""
    seen = {}
    for index in range(10**6):
        name = f"layers.{index}.weight"
        value = parameters._hash32(name)
        if value in seen:
            return seen[value], name
        seen[value] = name
    raise AssertionError("no collision found")


def test_names_with_the_same_hash_get_different_ids_in_any_order():
    pair = colliding_names()
    ids = parameter_ids([*pair, "other"])
    assert len(set(ids.values())) == 3
    assert ids == parameter_ids(["other", *reversed(pair)])
    first = min(pair)
    assert ids[first] == parameter_ids([first])[first]


def test_the_table_hash_is_the_recorded_one_in_any_order():
    assert table_hash({"a": (2, 3), "b": (4,)}) == "b4e39c3ccfb607d134e09c2f9846e467"
    assert table_hash({"b": (4,), "a": (2, 3)}) == "b4e39c3ccfb607d134e09c2f9846e467"
