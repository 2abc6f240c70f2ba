"""Weights shared by fewer ranks than there are: replicas that exchange only scalars, and the same run."""

from __future__ import annotations

import pytest
import torch
from deepspeed import comm
from deepspeed.comm.comm import comms_logger
from ranks import run_ranks
from tiny_runs import NUM_BLOCKS, full_weights, start_engine, train
from torch.testing._internal.distributed.fake_pg import FakeStore

from lezo_ds import distributed
from lezo_ds.config import check_world, config_from_dict
from lezo_ds.distributed.accelerator import adapt_to_cpu
from lezo_ds.errors import UserError
from lezo_ds.sharding import zero3
from lezo_ds.step import PlanFormat, scalar_bytes

pytestmark = pytest.mark.distributed

NUM_STEPS = 4


def _train(directory, dtype, num_ranks, partition_size):
    engine = start_engine(directory, dtype, num_ranks, partition_size=partition_size)
    shards = {p.name: (p.start, p.count) for p in engine.weights.parameters}
    records = train(engine, NUM_STEPS)
    digest, weights = engine.weights.digest(), full_weights(engine)
    fresh = start_engine(directory, dtype, num_ranks, partition_size=partition_size)
    fresh.load_checkpoint(directory / "none", records)
    return records, digest, weights, shards, fresh.weights.digest()


def _timeouts():
    distributed.init_distributed(timeout_seconds=77)
    groups = (torch.distributed.group.WORLD, zero3._partition_group(1))
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_a_group_waits_as_long_for_its_ranks_as_all_do():
    assert run_ranks(_timeouts, 2) == [[77, 77], [77, 77]]


def _group_on_torchs_fake_backend():
    adapt_to_cpu()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    comm.init_distributed(verbose=False)
    return zero3._world_timeout(), torch.distributed.get_process_group_ranks(zero3._partition_group(2))


def test_a_backend_that_does_not_tell_its_timeout_makes_groups_too():
    assert run_ranks(_group_on_torchs_fake_backend, 1) == [(None, [0, 1])]


def _groups_of(partition_size):
    distributed.init_distributed()
    before = set(torch.distributed.distributed_c10d._world.pg_map)
    group = zero3._partition_group(partition_size)
    made = set(torch.distributed.distributed_c10d._world.pg_map) - before
    return torch.distributed.get_process_group_ranks(group), len(made)


def test_a_rank_makes_no_group_but_its_own():
    assert run_ranks(_groups_of, 4, 1) == [([rank], 1) for rank in range(4)]
    assert run_ranks(_groups_of, 4, 2) == [([0, 1], 1), ([0, 1], 1), ([2, 3], 1), ([2, 3], 1)]


@pytest.mark.parametrize(
    ("num_ranks", "partition_size", "dtype"),
    [(2, 1, "fp32"), (4, 2, "bf16"), pytest.param(4, 1, "fp32", marks=pytest.mark.long)],
)
def test_replicas_equal_full_partitioning_bit_for_bit(opt_directory, dtype, num_ranks, partition_size):
    (records, digest, weights, *_), *_ = run_ranks(_train, num_ranks, opt_directory, dtype, num_ranks, None)
    found = run_ranks(_train, num_ranks, opt_directory, dtype, num_ranks, partition_size)
    for other_records, other_digest, other_weights, _, replayed in found:
        assert other_records == records
        assert other_digest == replayed == digest
        assert other_weights.keys() == weights.keys()
        assert all(torch.equal(other_weights[name], weights[name]) for name in weights)
    for rank, (_, _, _, shards, _) in enumerate(found):
        assert shards == found[rank % partition_size][3]
        for name, (start, count) in shards.items():
            numel = weights[name].numel()
            assert start == min(rank % partition_size * -(-numel // partition_size), numel)
            assert count <= -(-numel // partition_size)


def _count_bytes(directory, partition_size):
    """Return {operation: bytes} of ten steps of 4 micro-batches, DeepSpeed's tracing steps left out."""
    changes = {"comms_logger": {"enabled": True, "prof_all": True, "verbose": False}}
    engine = start_engine(directory, num_ranks=4, ds_changes=changes, partition_size=partition_size)
    train(engine, 2)
    comms_logger.reset_data()
    train(engine, 10)
    return {
        operation: sum(size * entry[0] for size, entry in sizes.items())
        for operation, sizes in comms_logger.get_raw_data().items()
    }


def test_replicas_of_one_rank_exchange_nothing_but_scalars(opt_directory):
    for sent in run_ranks(_count_bytes, 4, opt_directory, 1):
        assert sent.keys() == {"broadcast", "all_reduce"}
        assert sum(sent.values()) == 10 * scalar_bytes(PlanFormat(NUM_BLOCKS, num_probes=2), 4)


def test_a_size_that_does_not_divide_the_ranks_is_refused():
    values = {
        "run_dir": "r",
        "model": {"path": "m", "dtype": "fp32"},
        "zo": {"learning_rate": 1e-6, "sparsity": 0.5},
        "train": {"steps": 1, "batch_size": 16, "micro_batch_size": 4},
        "partition_size": 3,
    }
    with pytest.raises(UserError, match="partition_size=3, 4 ranks; expected: a divisor of 4"):
        check_world(config_from_dict(values, "test"), 4)
