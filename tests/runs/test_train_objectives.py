"""Steps on every kind of loss: equal on any number of ranks, in any passes and micro-batches."""

import pytest
import torch
from ranks import run_ranks
from tiny_runs import start_engine
from tiny_tasks import task_config, write_tasks, write_writer

from lezo_ds.data.rewards import reward
from lezo_ds.data.task_data import load_task_data
from lezo_ds.errors import UserError
from lezo_ds.forward.batch import MicroBatch, to_device
from lezo_ds.forward.probes import Perturbation
from lezo_ds.zo.keys import direction_key
from lezo_ds.zo.passes import KeyedProbe

SCALE = 1e-2


@reward
def characters_beyond_the_title(answers, records):
    return [sum(map(ord, a)) - len(r["title"]) for a, r in zip(answers, records, strict=True)]


ANSWERED = {"generation__max_new_tokens": 12}
DRAWN = {
    **ANSWERED,
    "train__objective": "test_train_objectives:characters_beyond_the_title",
    "generation__temperature": 1.0,
    "generation__num_samples": 2,
    "generation__stop": ["xy", "zz"],
}
OBJECTIVES = {
    "teacher forcing": ("copa", {}),
    "f1": ("squad", {"train__objective": "f1", **ANSWERED}),
    "reward of drawn answers": ("squad", DRAWN),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    root = tmp_path_factory.mktemp("assets")
    write_writer(root / "writer", "llama", seed=10)
    write_tasks(root / "data")
    return root


def train(assets, num_ranks, forward, objective, micro_batch_size=2, **zo):
    task, changes = OBJECTIVES[objective]
    sizes = {"train__batch_size": 4, "train__micro_batch_size": micro_batch_size}
    of_zo = {f"zo__{name}": value for name, value in zo.items()}
    config = task_config(assets / "writer", assets / "data", task, **sizes, **changes, **of_zo)
    data = load_task_data(config)
    settings = {"probes_per_pass": forward, "perturbation_scale": SCALE, "sparsity": 0.25, **zo}
    engine = start_engine(assets / "writer", num_ranks=num_ranks, **settings)
    records = [engine.train_batch(data.step_batch(config, step), data.loss) for step in range(2)]
    return records, engine.weights.digest()


def train_all(assets, num_ranks, *settings):
    return [
        {o: train(assets, num_ranks, forward, o, size) for o in OBJECTIVES}
        for forward, size in settings
    ]


@pytest.mark.thorough
@pytest.mark.distributed
def test_forwards_ranks_and_passes_change_no_bit_of_a_step_and_micro_batches_no_loss(assets):
    (found,) = run_ranks(train_all, 1, assets, 1, (2, 2), (1, 2), (2, 4))
    alone, one_pass_each, whole_batches = found
    for (by_two,) in run_ranks(train_all, 2, assets, 2, (2, 2)):
        assert by_two == alone == one_pass_each
    for objective, (records, _) in alone.items():
        assert any(record.projected_grads[0] != 0 for record in records)
        parts, whole = records[0], whole_batches[objective][0][0]
        assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
        # The difference of two float32 losses, over twice the perturbation scale.
        error = abs(parts.projected_grads[0] - whole.projected_grads[0])
        assert error <= 1e-6 * max(1, abs(whole.loss)) / SCALE


def train_with_batches_of_ones_own(assets):
    """The records of a step of a loop of one's own, and those of the same batch without groups."""
    texts = torch.arange(5, 21).view(4, 4)
    batches = [MicroBatch({"input_ids": part}, weight=2) for part in texts.chunk(2)]

    def loss(logits, batch):
        return logits[:, -1].log_softmax(dim=-1)[:, 7].neg()

    settings = {"perturbation_scale": SCALE, "sparsity": 0.0, "noise_rank": 1}
    engine = start_engine(assets / "writer", examples_per_direction=1, **settings)
    for wrong in (slice(1), (..., None)):  # one loss for both examples, a table of losses
        with pytest.raises(UserError, match=r"returned \(., ?1?\), not one loss for each of 2 exa"):
            engine.train_batch(batches, lambda *words, wrong=wrong: loss(*words)[wrong])
    of_groups = engine.train_batch(batches, loss)
    engine.load_checkpoint("none", [of_groups], step=0)  # without its update
    slopes = []
    for place, text in enumerate(texts):
        example = to_device(MicroBatch({"input_ids": text[None]}, weight=1), engine.device)
        key = direction_key(of_groups.key, place)
        probes = tuple(KeyedProbe((key,), sign * SCALE) for sign in (1, -1))
        plus, minus = engine.run(example, Perturbation(probes, frozenset(of_groups.dropped_layers)))
        slopes.append(float(loss(plus, example) - loss(minus, example)) / (2 * SCALE))
    return of_groups.projected_grads, slopes


@pytest.mark.distributed
def test_a_loop_of_ones_own_measures_each_example_along_its_own_direction(assets):
    ((found, slopes),) = run_ranks(train_with_batches_of_ones_own, 1, assets)
    assert len(found) == 4
    assert found == pytest.approx(slopes, abs=1e-3 * max(map(abs, slopes)))
