"""Properties of every registered estimator, layer policy and update rule."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lezo_ds.zo.estimators import ESTIMATORS
from lezo_ds.zo.layers import LAYER_POLICIES
from lezo_ds.zo.records import StepRecord
from lezo_ds.zo.updates import Distribution, Sgd, SgdWeightDecay, updates_of_parameter

NUM_LAYERS = 5
DIRECTIONS = (1, 2, 5)
WIDTH = 6

DRAWS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "rademacher": lambda rng, shape: rng.choice([-1.0, 1.0], size=shape),
}

every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
every_draw = pytest.mark.parametrize("draw", [DRAWS[name] for name in get_args(Distribution)], ids=DRAWS)
every_policy = pytest.mark.parametrize("policy", LAYER_POLICIES.values(), ids=LAYER_POLICIES)
every_rule = pytest.mark.parametrize("rule", [Sgd, partial(SgdWeightDecay, 0.01)], ids=["sgd", "decay"])


def make_records(num_steps, *, num_directions=2, skipped=(), seed=0):
    """Records of a run with any numbers in it, some steps skipped."""
    rng = np.random.default_rng(seed)
    return [
        StepRecord(
            step=step,
            key=int(rng.integers(2**63)),
            dropped_layers=tuple(sorted(rng.choice(NUM_LAYERS, 2, replace=False).tolist())),
            projected_grads=() if step in skipped else tuple(rng.normal(size=num_directions).tolist()),
            learning_rate=0.1,
            perturbation_scale=1e-3,
            loss=None if step in skipped else float(rng.uniform(0, 2)),
            applied=step not in skipped,
        )
        for step in range(num_steps)
    ]


def make_estimator(estimator, num_directions, perturbation_scale=1e-3):
    """An estimator with this number of directions, or the nearest that it works with."""
    return estimator(
        perturbation_scale=perturbation_scale, num_directions=max(num_directions, estimator.min_directions)
    )


def estimates_of(estimator, loss, theta, num_steps, draw=DRAWS["normal"]):
    """Estimates of the gradient of loss(points [n, WIDTH]) at theta: [steps, WIDTH]."""
    rng = np.random.default_rng(1)
    found = np.zeros((num_steps, WIDTH))
    probes = estimator.probes(())
    for step in range(num_steps):
        z = draw(rng, (estimator.num_directions, WIDTH))
        losses = [float(loss(theta + probe.scale * z[probe.direction])) for probe in probes]
        found[step] = np.mean(
            np.array(estimator.estimate(probes, losses).projected_grads)[:, None] * z, axis=0
        )
    return found


@every_estimator
@pytest.mark.parametrize("num_directions", DIRECTIONS)
def test_an_estimator_probes_every_direction_and_always_as_often(estimator, num_directions):
    made = make_estimator(estimator, num_directions)
    probes = made.probes(make_records(7))
    assert len(probes) == len(made.probes(())) == made.num_probes
    assert {probe.direction for probe in probes if probe.scale != 0} == set(range(made.num_directions))
    assert made.probes(make_records(7)) == probes


@every_estimator
@given(
    losses=st.lists(st.integers(0, 800).map(lambda n: n / 8), min_size=20, max_size=20, unique=True),
    shift=st.sampled_from([0.5, 4.0]),
    num_directions=st.sampled_from(DIRECTIONS),
)
def test_an_estimate_is_pure_and_blind_to_a_constant_in_the_loss(estimator, losses, shift, num_directions):
    made = make_estimator(estimator, num_directions, perturbation_scale=0.5)
    probes = made.probes(())
    losses = losses[: len(probes)]
    found = made.estimate(probes, losses)
    assert len(found.projected_grads) == made.num_directions
    assert made.estimate(probes, losses) == found
    shifted = made.estimate(probes, [loss + shift for loss in losses])
    assert shifted.projected_grads == pytest.approx(found.projected_grads, rel=1e-3, abs=1e-6)
    assert shifted.loss == pytest.approx(found.loss + shift)


@every_estimator
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("num_directions", DIRECTIONS)
def test_a_loss_that_is_not_finite_at_any_probe_makes_the_step_not_applicable(estimator, bad, num_directions):
    made = make_estimator(estimator, num_directions)
    probes = made.probes(())
    for place in range(len(probes)):
        losses = [1.0 + 0.1 * index for index in range(len(probes))]
        losses[place] = bad
        with contextlib.suppress(ArithmeticError):
            assert not made.estimate(probes, losses).is_finite


@every_estimator
@every_draw
@pytest.mark.parametrize("num_directions", DIRECTIONS)
def test_the_update_descends_on_average_along_the_gradient(estimator, draw, num_directions):
    made = make_estimator(estimator, num_directions)
    gradient = np.arange(1.0, WIDTH + 1)
    found = estimates_of(made, lambda point: 3 + point @ gradient, np.zeros(WIDTH), num_steps=3000, draw=draw)
    along = found @ gradient
    assert along.mean() > 4 * along.std() / len(along) ** 0.5
    mean = found.mean(axis=0)
    # Signs are not isotropic. A normalized estimate of few of them favors none of the large elements.
    least = 0.97 if draw is DRAWS["rademacher"] and made.bias else 0.99
    assert mean @ gradient > least * np.linalg.norm(mean) * np.linalg.norm(gradient)


@every_estimator
@every_draw
def test_the_estimate_is_unbiased_or_its_bias_is_stated(estimator, draw):
    made = make_estimator(estimator, num_directions=2)
    theta = np.linspace(-1, 1, WIDTH)
    found = estimates_of(made, lambda point: (point**2).sum(), theta, num_steps=8000, draw=draw)
    scores = (found.mean(axis=0) - 2 * theta) / (found.std(axis=0) / len(found) ** 0.5)
    # The root mean square of WIDTH scores: above 1.96 once in a thousand times.
    assert (np.sqrt((scores**2).mean()) < 1.96) != bool(made.bias)


@every_estimator
def test_a_stated_bias_is_that_of_a_step_of_normal_length(estimator):
    """What is stated for every biased estimator: the loss may be scaled, and the estimate stays the same."""
    made = make_estimator(estimator, num_directions=4)
    probes = made.probes(())
    losses = [1.0, 1.5, 0.25, 2.0, 1.75, 0.5, 1.25, 3.0][: len(probes)]
    found = made.estimate(probes, losses).projected_grads
    scaled = made.estimate(probes, [1024 * loss for loss in losses]).projected_grads
    assert scaled == (found if made.bias else tuple(1024 * gradient for gradient in found))


@every_policy
@pytest.mark.parametrize("num_dropped", range(NUM_LAYERS + 1))
def test_a_policy_drops_as_many_sorted_layers_as_it_is_told_to(policy, num_dropped):
    made = policy(num_layers=NUM_LAYERS, num_dropped=num_dropped)
    records = make_records(30)
    for step in range(30):
        sample = made.sample(3, records[:step])
        assert len(set(sample.dropped)) == num_dropped
        assert list(sample.dropped) == sorted(sample.dropped)
        assert set(sample.dropped) <= set(range(NUM_LAYERS))
        assert len(sample.weights) == (NUM_LAYERS if made.has_weights else 0)
        assert made.sample(3, list(records[:step])) == sample


@every_policy
def test_every_block_has_the_same_mean_update_or_the_bias_of_its_policy_is_stated(policy):
    """The mean over seeds, at the same records: of what a projected gradient is multiplied by in a block."""
    num_dropped, num_seeds, records = 3, 3000, make_records(12, skipped=(4,))
    made = policy(num_layers=NUM_LAYERS, num_dropped=num_dropped)
    factors = np.zeros((num_seeds, NUM_LAYERS))
    for seed in range(num_seeds):
        sample = made.sample(seed, records)
        kept = [layer for layer in range(NUM_LAYERS) if layer not in sample.dropped]
        factors[seed, kept] = np.array(sample.weights or (1.0,) * NUM_LAYERS)[kept]
    deviation = np.maximum(factors.std(axis=0), 1e-9) / num_seeds**0.5
    scores = (factors.mean(axis=0) - (1 - num_dropped / NUM_LAYERS)) / deviation
    # The root mean square of NUM_LAYERS scores: above 2.03 once in a thousand times.
    assert (np.sqrt((scores**2).mean()) < 2.03) != bool(made.bias)


@every_policy
@pytest.mark.parametrize("num_dropped", [-1, NUM_LAYERS + 1])
def test_an_impossible_number_of_dropped_layers_is_our_own_bug(policy, num_dropped):
    with pytest.raises(ValueError, match="is not in"):
        policy(num_layers=NUM_LAYERS, num_dropped=num_dropped)


@every_rule
def test_what_a_step_does_depends_on_no_later_step_and_steps_add_up(rule):
    records = make_records(12, skipped=(4, 5))
    made = rule()
    whole = made.step_updates(records, 0, 12)
    assert len(whole) == 10
    singly = [made.step_updates(records[: step + 1], step, step + 1) for step in range(12)]
    assert whole == [update for step in singly for update in step]


@every_rule
def test_a_step_leaves_the_layers_that_it_dropped_alone(rule):
    records = make_records(1)
    updates = rule().step_updates(records, 0, 1)
    for layer in (None, *range(NUM_LAYERS)):
        for decays in (True, False):
            changes = updates_of_parameter(updates, layer, decays=decays)
            assert bool(changes) == (layer not in records[0].dropped_layers)


@every_rule
def test_a_skipped_step_has_no_part_in_any_update(rule):
    """Its gradients may be recorded: those of an outlier are."""
    records = make_records(12)
    skipped = StepRecord(**{**vars(records[5]), "applied": False})
    without = [
        *records[:5],
        StepRecord(**{**vars(skipped), "projected_grads": (), "loss": None}),
        *records[6:],
    ]
    with_outlier = [*records[:5], skipped, *records[6:]]
    found = rule().step_updates(with_outlier, 0, 12)
    assert len(found) == 11
    assert [update.terms for update in found] == [u.terms for u in rule().step_updates(without, 0, 12)]
    assert all(term.record.applied for update in found for term in update.terms)


@every_rule
def test_an_update_is_proportional_to_the_projected_gradients_and_to_the_layer_weights(rule):
    records = make_records(1)
    (update,) = rule().step_updates(records, 0, 1)
    weights = tuple(2.0 + layer for layer in range(NUM_LAYERS))
    weighted = [StepRecord(**{**vars(records[0]), "layer_weights": weights})]
    (other,) = rule().step_updates(weighted, 0, 1)
    for layer in set(range(NUM_LAYERS)) - set(records[0].dropped_layers):
        plain = updates_of_parameter([update], layer, decays=False)
        scaled = updates_of_parameter([other], layer, decays=False)
        assert [change.key for change in scaled] == [change.key for change in plain]
        for change, bare in zip(scaled, plain, strict=True):
            assert change.coefficient == pytest.approx(weights[layer] * bare.coefficient)
