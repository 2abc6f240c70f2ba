"""Several directions a step: exact, the same on any number of ranks, and of less variance."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from reference import ReferenceRun
from tiny_runs import full_weights, make_batch, start_engine, train, zo_config

from lezo_ds.config import check_world, config_from_dict
from lezo_ds.data.objectives import classification_loss
from lezo_ds.errors import UserError
from lezo_ds.noise import noise_backend
from lezo_ds.zo.keys import direction_key

pytestmark = pytest.mark.distributed

NUM_DIRECTIONS = 4
NUM_STEPS = 20
CPU = torch.device("cpu")


def _train(directory, num_ranks, forward):
    engine = start_engine(directory, num_ranks=num_ranks, directions=NUM_DIRECTIONS, probes_per_pass=forward)
    records = train(engine, NUM_STEPS, num_micro_batches=1)
    return records, engine.weights.digest(), full_weights(engine)


@pytest.fixture(scope="module")
def runs(opt_directory):
    """The same steps of one micro-batch as every rank of 1, 2 and 4 did them: on 4, each in a direction."""
    return [run for ranks in (1, 2, 4) for run in run_ranks(_train, ranks, opt_directory, ranks, 2)]


def test_any_number_of_ranks_gives_the_same_records_and_weights(runs):
    records, digest, _ = runs[0]
    assert all(len(set(record.projected_grads)) == NUM_DIRECTIONS for record in records)
    for other_records, other_digest, _ in runs[1:]:
        assert other_records == records
        assert other_digest == digest


def test_two_passes_equal_the_plain_reference_bit_for_bit(opt_directory):
    records, _, weights = run_ranks(_train, 1, opt_directory, 1, 1)[0]
    settings = zo_config()
    reference = ReferenceRun(
        *(opt_directory, torch.float32, settings.learning_rate, settings.perturbation_scale),
        "model.decoder.layers",
    )
    for step, record in enumerate(records):
        seeds = [direction_key(record.key, direction) for direction in range(NUM_DIRECTIONS)]
        expected = reference.step_in_directions(make_batch(step, 1), seeds, record.dropped_layers)
        assert (record.loss, *record.projected_grads) == expected, step
    stored = reference.stored()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)


def _estimates(directory, num_directions, num_steps, name):
    """Return the gradient estimates of one parameter at weights that stay as they are: [steps, numel]."""
    engine = start_engine(directory, directions=num_directions, learning_rate=0.0, sparsity=0.0)
    parameter = next(p for p in engine.weights.parameters if p.name == name)
    noise = noise_backend(CPU)
    batch = make_batch(0, 1)
    estimates = []
    for _ in range(num_steps):
        record = engine.train_batch(batch, classification_loss)
        estimate = torch.zeros(parameter.numel)
        for direction, gradient in enumerate(record.projected_grads):
            seed = direction_key(record.key, direction)
            z = noise.draw(seed, parameter.named.parameter_id, 0, parameter.numel, CPU)
            estimate += gradient / num_directions * z
        estimates.append(estimate)
    return torch.stack(estimates)


def test_the_variance_of_the_estimate_falls_as_one_over_the_number_of_directions(opt_directory):
    name = "model.decoder.final_layer_norm.weight"
    (one,) = run_ranks(_estimates, 1, opt_directory, 1, 400, name)
    (many,) = run_ranks(_estimates, 1, opt_directory, NUM_DIRECTIONS, 400, name)
    ratio = float(one.var(dim=0).mean() / many.var(dim=0).mean())
    # Each variance is a mean over 33 coordinates of 400 draws whose g is common to all coordinates.
    assert 0.75 * NUM_DIRECTIONS < ratio < 1.33 * NUM_DIRECTIONS
    print(f"variance ratio with {NUM_DIRECTIONS} directions: {ratio:.2f}")


def test_ranks_must_divide_the_passes():
    values = {
        "run_dir": "r",
        "model": {"path": "m", "dtype": "fp32"},
        "zo": {"learning_rate": 1e-6, "sparsity": 0.5, "directions": 4},
        "train": {"steps": 1, "batch_size": 16, "micro_batch_size": 16},
    }
    config = config_from_dict(values, "test")
    for num_ranks in (1, 2, 4):
        check_world(config, num_ranks)
    with pytest.raises(UserError, match="3 ranks"):
        check_world(config, 3)
