"""Steps on every kind of loss: equal on any number of ranks, in either forward, in any micro-batches."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from tiny_runs import start_engine
from tiny_tasks import task_config, write_tasks, write_writer

from lezo_ds.data.objectives import reward
from lezo_ds.data.task_data import load_task_data

SCALE = 1e-2
BATCH_SIZE = 4


def squares(logits, batch):
    return logits.float().square().mean(dim=1)[batch.labels["token_slots"][:, 0]]


@reward
def characters_beyond_the_title(answers, records):
    return [sum(map(ord, a)) - len(r["title"]) for a, r in zip(answers, records, strict=True)]


DRAWN = {
    "train__objective": "test_train_objectives:characters_beyond_the_title",
    "generation__temperature": 1.0,
    "generation__num_samples": 2,
    "generation__max_new_tokens": 12,
    "generation__stop": ["xy", "zz"],
}
OBJECTIVES = {
    "teacher forcing": ("copa", {}),
    "f1": ("squad", {"train__objective": "f1", "generation__max_new_tokens": 12}),
    "own, of logits": ("copa", {"train__objective": "test_train_objectives:squares"}),
    "reward of drawn answers": ("squad", DRAWN),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    write_writer(root / "writer", "llama", seed=10)
    write_tasks(root / "data")
    return root


def train(assets, num_ranks, forward, objective, micro_batch_size=2, directions=1, steps=2):
    """Return the records of some steps and the digest of the weights after them."""
    task, changes = OBJECTIVES[objective]
    sizes = {"train__batch_size": BATCH_SIZE, "train__micro_batch_size": micro_batch_size}
    config = task_config(assets / "writer", assets / "data", task, **sizes, **changes)
    data = load_task_data(config)
    settings = {"probes_per_pass": forward, "directions": directions, "perturbation_scale": SCALE}
    engine = start_engine(assets / "writer", num_ranks=num_ranks, sparsity=0.25, **settings)
    records = [engine.train_batch(data.step_batch(config, step), data.loss) for step in range(steps)]
    return records, engine.weights.digest()


def train_all(assets, num_ranks, forwards):
    return {(o, f): train(assets, num_ranks, f, o) for o in OBJECTIVES for f in forwards}


def train_alone(assets):
    """Return `train_all`, records by objective and micro-batch, and two directions in 2 passes and in 1."""
    by_size = {(o, size): train(assets, 1, 2, o, size, steps=1)[0][0] for o in OBJECTIVES for size in (1, 4)}
    directions = [train(assets, 1, forward, "f1", directions=2, steps=1) for forward in (2, 4)]
    return train_all(assets, 1, (2, 1)), by_size, directions


@pytest.mark.distributed
def test_forwards_ranks_and_passes_change_no_bit_of_a_step_and_micro_batches_no_loss(assets):
    ((alone, by_size, (two_passes, one_pass)),) = run_ranks(train_alone, 1, assets)
    two = run_ranks(train_all, 2, assets, 2, (2,))
    assert two_passes == one_pass
    for objective in OBJECTIVES:
        records, _ = alone[objective, 2]
        assert alone[objective, 1] == two[0][objective, 2] == two[1][objective, 2] == alone[objective, 2]
        assert any(record.projected_grads[0] != 0 for record in records)
        whole, parts = by_size[objective, BATCH_SIZE], by_size[objective, 1]
        assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
        # The difference of two float32 losses, over twice the perturbation scale.
        error = abs(parts.projected_grads[0] - whole.projected_grads[0])
        assert error <= 1e-6 * max(1, abs(whole.loss)) / SCALE
