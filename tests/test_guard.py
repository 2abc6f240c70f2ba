from __future__ import annotations

import pytest
import torch

from lezo_ds.noise.bit_sum import MODULUS, bit_sum
from lezo_ds.sharding.guard import ShardGuard


def flip(tensor, index, bit):
    size = tensor.element_size()
    integers = tensor.view({2: torch.int16, 4: torch.int32}[size])
    integers[index] ^= 1 << bit if bit < 8 * size - 1 else -(1 << bit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 13])
def test_every_flip_of_one_bit_changes_the_sum(dtype, count):
    values = (torch.randn(32) * 100).to(dtype)[3 : 3 + count]
    low = torch.randint(-(2**15), 2**15, (count,), dtype=torch.int16)
    before = bit_sum(values, low)
    for tensor in (values, low):
        for index in range(count):
            for bit in range(8 * tensor.element_size()):
                flip(tensor, index, bit)
                assert bit_sum(values, low) != before, (index, bit)
                flip(tensor, index, bit)
    assert bit_sum(values, low) == before == (bit_sum(values) + bit_sum(low)) % MODULUS


def test_an_empty_shard_has_a_sum():
    assert bit_sum(torch.empty(0)) == 0


@pytest.fixture
def guard_and_shards():
    shards = {name: torch.randn(10).bfloat16() for name in ("a", "b", "c")}
    guard = ShardGuard(list(shards), torch.device("cpu"))
    for name, shard in shards.items():
        guard.accept(name, shard, None)
    return guard, shards


def test_what_was_not_accepted_is_suspect_and_stays_so(guard_and_shards):
    guard, shards = guard_and_shards
    shards["a"] += 1
    guard.accept("a", shards["a"], None)
    flip(shards["b"], 3, 2)
    for name, shard in shards.items():
        guard.look(name, shard, None)
    assert guard.suspects == ["b"]
    flip(shards["b"], 3, 2)
    flip(shards["c"], 9, 15)
    for name, shard in shards.items():
        guard.look(name, shard, None)
    assert guard.suspects == ["b", "c"]


def test_what_an_update_finds_is_compared_and_what_it_leaves_is_accepted(guard_and_shards):
    guard, shards = guard_and_shards
    flip(shards["c"], 0, 0)
    for name in ("c", "a"):
        sums = guard.sums_of(name)
        sums[0] += bit_sum(shards[name])
        shards[name] += 1
        sums[1] += bit_sum(shards[name])
    guard.finish_updates()
    assert guard.suspects == ["c"]
    for name, shard in shards.items():
        guard.look(name, shard, None)
    assert guard.suspects == ["c"]
    assert guard.sums() == [int(bit_sum(shard)) for shard in shards.values()]
    guard.finish_updates()
    assert guard.suspects == ["c"]
