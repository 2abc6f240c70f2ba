"""Steps on every kind of loss: equal on any number of ranks, in either forward, in any micro-batches."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiny_runs import start_engine
from tiny_tasks import task_config, write_tasks, write_writer

from lezo_ds.data.objectives import reads_answers, reward
from lezo_ds.data.task_data import load_task_data

NUM_STEPS = 2
SCALE = 1e-2
BATCH_SIZE = 4


def squares(logits, batch):
    return logits.float().square().mean(dim=1)[batch.labels["token_slots"][:, 0]]


@reads_answers
def lengths(answers, batch):
    return torch.tensor([float(len(answer)) for answer in answers])


@reward
def characters_beyond_the_title(answers, records):
    return [
        sum(map(ord, answer)) - len(record["title"]) for answer, record in zip(answers, records, strict=True)
    ]


OBJECTIVES = {
    "candidates": ("cb", "task"),
    "teacher forcing": ("copa", "task"),
    "teacher forcing of answers": ("squad", "task"),
    "f1": ("squad", "f1"),
    "own, of logits": ("copa", "test_train_objectives:squares"),
    "own, of answers": ("cb", "test_train_objectives:lengths"),
    "reward of drawn answers": ("squad", "test_train_objectives:characters_beyond_the_title"),
}
DRAWN = {
    "generation__temperature": 1.0,
    "generation__num_samples": 2,
    "generation__max_new_tokens": 12,
    "generation__stop": ["xy", "zz"],
}
"""Keys of the objective that draws answers."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    write_writer(root / "writer", "llama", seed=10)
    write_tasks(root / "data")
    return root


def train(assets, num_ranks, forward, objective, micro_batch_size=2, directions=1, **changes):
    """Return the records of some steps and the digest of the weights after them."""
    task, name = OBJECTIVES[objective]
    sizes = {"train__batch_size": BATCH_SIZE, "train__micro_batch_size": micro_batch_size}
    drawn = DRAWN if "drawn" in objective else {}
    keys = {"train__objective": name, **sizes, **drawn, **changes}
    config = task_config(assets / "writer", assets / "data", task, **keys)
    data = load_task_data(config)
    engine = start_engine(
        assets / "writer",
        num_ranks=num_ranks,
        probes_per_pass=forward,
        directions=directions,
        perturbation_scale=SCALE,
        sparsity=0.25,
    )
    records = [engine.train_batch(data.batch(config, step), data.loss) for step in range(NUM_STEPS)]
    return records, engine.weights.digest()


def train_all(assets, num_ranks, forwards):
    return {(o, f): train(assets, num_ranks, f, o) for o in OBJECTIVES for f in forwards}


def train_in_passes(assets):
    """Return the results with two directions of written answers: in two passes, and in one."""
    passes = [(2, {}), (4, {})]
    return [train(assets, 1, forward, "f1", directions=2, **changes) for forward, changes in passes]


def train_micro_batches(assets):
    """Return the first records of each objective, by the size of a micro-batch."""
    return {(o, size): train(assets, 1, 2, o, size)[0][0] for o in OBJECTIVES for size in (1, 4)}


@pytest.fixture(scope="module")
def by_ranks(assets):
    forwards = {1: (2, 1), 2: (2,)}
    return {n: run_ranks(train_all, n, assets, n, forwards[n]) for n in (1, 2)}


@pytest.mark.distributed
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_both_forwards_and_any_number_of_ranks_do_the_same_steps_bit_for_bit(by_ranks, objective):
    found = [rank for ranks in by_ranks.values() for rank in ranks]
    results = [result for rank in found for (name, _), result in rank.items() if name == objective]
    assert len(results) == 4
    assert all(result == results[0] for result in results)


@pytest.mark.distributed
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_two_signs_differ(by_ranks, objective):
    records, _ = by_ranks[1][0][objective, 2]
    assert all(record.applied for record in records)
    assert any(record.projected_grads[0] != 0 for record in records)


@pytest.mark.distributed
def test_any_number_of_micro_batches_gives_the_estimate_of_one_batch(assets):
    (found,) = run_ranks(train_micro_batches, 1, assets)
    for objective in OBJECTIVES:
        whole = found[objective, BATCH_SIZE]
        parts = found[objective, 1]
        assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
        # The difference of two float32 losses, over twice the perturbation scale.
        error = abs(parts.projected_grads[0] - whole.projected_grads[0])
        assert error <= 1e-6 * max(1, abs(whole.loss)) / SCALE


@pytest.mark.distributed
def test_written_answers_of_all_directions_in_one_pass_are_those_of_a_pass_for_each(assets):
    ((two_passes, *one_pass),) = run_ranks(train_in_passes, 1, assets)
    assert one_pass == [two_passes]
