"""Shards of a class that the package does not have."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import save_file

from lezo_ds import distributed
from lezo_ds.forward.dense import DenseDirections
from lezo_ds.noise import Elements
from lezo_ds.sharding.files import WeightFiles
from lezo_ds.sharding.shards import Shard
from lezo_ds.sharding.weights import ShardedWeights
from lezo_ds.zo.laws import DenseLaw
from lezo_ds.zo.records import StepRecord
from lezo_ds.zo.updates import step_updates

NUMEL = 10
RECORDS = [StepRecord(0, 7, (), 1e-2, 1e-3, projected_grads=(0.5,), loss=1.0)]


def sharded(shard):
    names = {shard.name: (shard.name,)}
    return ShardedWeights([shard], aliases=names, precision="stochastic")


class _CodedShard(Shard):
    """A frozen parameter in codes of 8 bits and a scale."""

    def __init__(self):
        parameter = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        super().__init__(parameter, "matrix", 0, Elements.all_of(3, (2, 5)), group=None)
        self.codes = torch.zeros(NUMEL, dtype=torch.int8)
        self.scale = 1.0

    def stored(self):
        return self.codes * self.scale

    def fill(self, values):
        self.scale = float(values.abs().max()) / 127
        self.codes = (values / self.scale).round().to(torch.int8)

    def gather_like(self, stored):
        return stored.view(self.shape)


def _use_codes(directory):
    distributed.init_distributed()
    shard = _CodedShard()
    weights = sharded(shard)
    weights.load([shard], WeightFiles(directory))
    before = weights.digest()
    weights.apply(step_updates(RECORDS, 0, 1), DenseDirections(DenseLaw()))
    return shard.gather(), before, weights.digest(), weights.unlike_replicas()


@pytest.mark.distributed
def test_a_shard_of_another_class_is_loaded_compared_and_gathered_by_its_interface(tmp_path):
    matrix = torch.linspace(-1, 1, NUMEL).view(2, 5)
    save_file({"matrix": matrix}, tmp_path / "model.safetensors")
    ((gathered, before, after, unlike),) = run_ranks(_use_codes, 1, tmp_path)
    torch.testing.assert_close(gathered, matrix, rtol=0, atol=1 / 127)
    assert not torch.equal(gathered, matrix)
    assert before == after
    assert unlike == []
