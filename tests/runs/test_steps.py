"""Steps on several ranks: the same bits on any number of them, and steps that are skipped."""

import math

import pytest
import torch
from ranks import run_ranks
from tiny_runs import attach_new_journal, full_weights, make_batch, start_engine, train

from lezo_ds import distributed
from lezo_ds.data.objectives import classification_loss
from lezo_ds.engine import MAX_SKIPPED_STEPS
from lezo_ds.errors import DivergenceError, UserError
from lezo_ds.journal import read_journal
from lezo_ds.sharding import zero3

pytestmark = pytest.mark.distributed


def _train(directory, num_ranks, partition_size, probes_per_pass):
    settings = {"directions": 8, "probes_per_pass": probes_per_pass, "dtype": "bf16"}
    engine = start_engine(directory, num_ranks=num_ranks, partition_size=partition_size, **settings)
    return train(engine, 3), engine.weights.digest(), full_weights(engine)


def test_ranks_groups_of_ranks_and_probes_in_one_pass_change_no_bit(opt_directory):
    ((records, digest, weights),) = run_ranks(_train, 1, opt_directory, 1, None, 2)
    for settings in ((2, None, 6), (4, 2, 16)):
        for others in run_ranks(_train, settings[0], opt_directory, *settings):
            assert others[:2] == (records, digest)
            assert all(torch.equal(others[2][name], weights[name]) for name in weights)


def _group_of_two():
    distributed.init_distributed(timeout_seconds=77)
    before = set(torch.distributed.distributed_c10d._world.pg_map)
    group = zero3._partition_group(2)
    num_made = len(set(torch.distributed.distributed_c10d._world.pg_map) - before)
    timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return torch.distributed.get_process_group_ranks(group), num_made, timeout


def test_a_rank_makes_no_group_but_its_own_which_waits_as_long_as_all_do():
    groups = ([0, 1], [0, 1], [2, 3], [2, 3])
    assert run_ranks(_group_of_two, 4) == [(ranks, 1, 77) for ranks in groups]


def _spoiled(engine, value, rank):
    """Return a loss function that gives `value` on one rank."""

    def loss(logits, batch):
        losses = classification_loss(logits, batch)
        return losses * value if engine.global_rank == rank else losses

    return loss


def _load_records_of_another_run(directory):
    others = start_engine(directory)
    others.seed += 1
    records = train(others, 5)
    engine = start_engine(directory)
    train(engine, 3)
    for wrong in (records[::-1], records[1:], [*records[:2], records[3]], ["x"]):
        with pytest.raises(UserError, match=r"not the steps 0, 1, 2, \.\.\. of a run; fix: pass"):
            engine.load_checkpoint("absent", wrong)
    engine.load_checkpoint("absent", records)
    return engine.weights.digest(), others.weights.digest()


def test_records_of_another_run_do_not_start_from_the_weights_in_memory(opt_directory):
    ((found, expected),) = run_ranks(_load_records_of_another_run, 1, opt_directory)
    assert found == expected


def _skip_steps(directory, journal):
    engine = start_engine(directory, num_ranks=2)
    attach_new_journal(engine, journal)

    def skip(value, rank):
        return engine.train_batch(make_batch(0), _spoiled(engine, value, rank))

    digests = [engine.weights.digest()]
    records = [skip(value, rank) for value, rank in ((math.nan, 1), (math.inf, 0), (-math.inf, 1))]
    digests.append(engine.weights.digest())
    records += train(engine, 1)
    digests.append(engine.weights.digest())
    records += [skip(math.nan, 1) for _ in range(MAX_SKIPPED_STEPS - 1)]
    engine = start_engine(directory, num_ranks=2)  # counts those of the engine before, too
    engine.load_checkpoint(directory / "none", records)
    digests.append(engine.weights.digest())
    with pytest.raises(DivergenceError):
        skip(math.nan, 1)
    return digests, records


def test_steps_without_a_finite_loss_are_skipped_by_all_ranks(opt_directory, tmp_path):
    journal = tmp_path / "journal.jsonl"
    (digests, records), second = run_ranks(_skip_steps, 2, opt_directory, journal)
    assert (digests, records) == second
    assert digests[0] == digests[1] != digests[2] == digests[3]
    applied = [False] * 3 + [True] + [False] * (MAX_SKIPPED_STEPS - 1)
    assert [record.applied for record in records] == applied
    assert all(r.loss is None and r.projected_grads == () for r in records if not r.applied)
    assert list(read_journal(journal)[1]) == records
