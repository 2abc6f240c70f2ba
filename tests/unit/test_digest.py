from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lezo_ds.sharding import digest
from lezo_ds.sharding.digest import shard_digest

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
    whole = shard_digest(values, 5, 9)
    monkeypatch.setattr(digest, "_CHUNK", 64)
    assert shard_digest(values, 5, 9) == whole


def test_keys_of_neighbouring_elements_and_parameters_share_no_pattern():
    one = torch.ones(1, dtype=torch.int16)
    keys = [shard_digest(one, start, parameter_id) for start in range(200) for parameter_id in range(20)]
    assert len(set(keys)) == 4000
    ones_per_bit = torch.tensor([[key >> bit & 1 for bit in range(1, 64)] for key in keys]).double().mean(0)
    assert (ones_per_bit - 0.5).abs().max() < 0.05


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
