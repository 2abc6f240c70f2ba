from __future__ import annotations

import pytest
import torch

from lezo_ds.model.guard import ShardGuard, bit_sum


def flip(tensor, index, bit):
    size = tensor.element_size()
    integers = tensor.view({2: torch.int16, 4: torch.int32}[size])
    integers[index] ^= 1 << bit if bit < 8 * size - 1 else -(1 << bit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int16])
@pytest.mark.parametrize("count", [1, 3, 8, 13])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_every_flip_of_one_bit_is_seen_at_any_size_and_alignment(dtype, count, offset):
    values = (torch.randn(32) * 100).to(dtype)[offset : offset + count]
    before = bit_sum(values)
    for index in range(count):
        for bit in range(8 * values.element_size()):
            flip(values, index, bit)
            assert bit_sum(values) != before, (index, bit)
            flip(values, index, bit)
    assert bit_sum(values) == before


def test_an_empty_shard_has_a_sum():
    assert bit_sum(torch.empty(0)) == 0


def test_what_was_not_accepted_is_suspect_and_stays_so():
    guard = ShardGuard()
    shards = {name: torch.randn(10).bfloat16() for name in ("a", "b", "c")}
    low = torch.zeros(10, dtype=torch.int16)
    for name, shard in shards.items():
        guard.accept(name, shard, low)
        guard.look(name, shard, low)
    assert guard.suspects == []
    shards["a"] += 1
    guard.accept("a", shards["a"], low)
    flip(shards["b"], 3, 2)
    flip(low, 9, 15)
    guard.look("a", shards["a"], torch.zeros(10, dtype=torch.int16))
    guard.look("b", shards["b"], torch.zeros(10, dtype=torch.int16))
    assert guard.suspects == ["b"]
    guard.look("c", shards["c"], low)
    assert guard.suspects == ["b", "c"]
