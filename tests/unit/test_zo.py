"""The paper's own estimator, layer policy and update rule, and the keys: exact values and arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_zo_properties import make_records

from lezo_ds.errors import UserError
from lezo_ds.zo.estimators import mean_losses
from lezo_ds.zo.estimators.spsa import Spsa
from lezo_ds.zo.keys import direction_key, layer_order, step_key
from lezo_ds.zo.layers import LAYER_POLICIES
from lezo_ds.zo.layers.adalezo import AdaLezo
from lezo_ds.zo.layers.fixed import Fixed
from lezo_ds.zo.layers.sampling import kept_probabilities, weighted_sample
from lezo_ds.zo.layers.uniform import Uniform
from lezo_ds.zo.layers.weighted import Weighted
from lezo_ds.zo.passes import passes_of_step
from lezo_ds.zo.records import StepRecord
from lezo_ds.zo.schedules import SCHEDULES, LearningRates
from lezo_ds.zo.updates.base import updates_of_parameter
from lezo_ds.zo.updates.sgd import Sgd

LOSSES = st.lists(
    st.tuples(st.floats(0, 1e3, width=32), st.floats(0, 1e3, width=32)), min_size=1, max_size=40
)


@given(LOSSES, st.floats(1, 1e4), st.floats(1e-4, 1))
def test_spsa_is_exact_to_float64_rounding(losses, weight, scale):
    estimator = Spsa(perturbation_scale=scale)
    means = mean_losses([side for pair in losses for side in pair], 2, weight)
    found = estimator.estimate(estimator.probes(()), means)
    plus, minus = (sum(map(Fraction, side)) / Fraction(weight) for side in zip(*losses, strict=True))
    exact = (plus - minus) / (2 * Fraction(scale))
    rounding = 1e-13 * float(plus + minus) / scale
    assert abs(found.projected_grads[0] - float(exact)) <= rounding
    assert math.isclose(found.loss, (plus + minus) / 2, rel_tol=1e-13, abs_tol=0)


def test_spsa_of_several_directions_is_the_recorded_arithmetic():
    estimator = Spsa(perturbation_scale=1e-3, num_directions=3)
    losses = [0.7, 0.69, 0.71, 0.72, 0.1, 0.3]
    found = estimator.estimate(estimator.probes(()), losses)
    expected = [(losses[2 * d] - losses[2 * d + 1]) / (2 * 1e-3) for d in range(3)]
    assert found.projected_grads == tuple(expected)
    assert found.loss == (((0.7 + 0.69) / 2 + (0.71 + 0.72) / 2) + (0.1 + 0.3) / 2) / 3


def test_sums_are_rounded_term_by_term_in_the_given_order():
    # Compensated or exact summation would find 2**-53 + 2**-53 = 2**-52 next to the 1.
    tiny = 2.0**-53
    assert mean_losses([1.0, tiny, tiny], 1, 1.0) == [1.0]
    assert mean_losses([tiny, tiny, 1.0], 1, 1.0) == [1.0 + 2.0**-52]


def test_the_loss_is_a_mean_over_the_weight_of_all_micro_batches():
    assert mean_losses([6.0, 3.0, 2.0, 1.0], 2, 4) == [2.0, 1.0]


def test_keys_are_the_recorded_ones():
    keys = [step_key(*run) for run in ((0, 0), (0, 1), (1, 0), (7, 19_999))]
    assert keys == [0xBFD19E8F440453C6, 0xB4A311AB169D9AE9, 0xB0E18BE79783CF55, 0x61FE77DE3B79821A]


def test_no_two_steps_of_any_run_share_a_key():
    keys = {step_key(run, step) for run in range(20) for step in range(1000)}
    assert len(keys) == 20_000
    assert all(0 <= key < 2**64 for key in keys)
    assert step_key(1, 11) != step_key(11, 1)


def test_the_first_direction_is_that_of_a_step_with_one():
    keys = [direction_key(77, direction) for direction in range(1000)]
    assert keys[0] == 77
    assert len(set(keys)) == 1000
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize(
    ("seed", "step", "num_layers", "kept"),
    [
        (0, 0, 24, (0, 3, 5, 9, 16, 18)),
        (0, 1, 24, (1, 4, 9, 17, 19, 20)),
    ],
)
def test_uniform_samples_are_the_recorded_ones(seed, step, num_layers, kept):
    sample = Uniform(num_layers, num_layers - len(kept)).sample(seed, make_records(step))
    assert sample.dropped == tuple(layer for layer in range(num_layers) if layer not in kept)


def chi_square(counts, num_cells, num_draws):
    expected = num_draws / num_cells
    return sum((count - expected) ** 2 / expected for count in counts)


def dropped(seed, step, num_layers, num_dropped):
    return tuple(sorted(layer_order(seed, step, num_layers)[:num_dropped]))


def test_every_subset_is_equally_likely():
    num_draws = 6000
    counts = Counter(dropped(11, step, 5, 2) for step in range(num_draws))
    assert set(counts) == set(combinations(range(5), 2))
    # 9 degrees of freedom: above 27.9 once in a thousand times.
    assert chi_square(counts.values(), 10, num_draws) < 27.9


def test_samples_of_neighboring_seeds_and_steps_are_independent():
    num_draws = 6000
    for other in (lambda step: (11, step + 1), lambda step: (12, step)):
        pairs = Counter(dropped(11, step, 3, 1) + dropped(*other(step), 3, 1) for step in range(num_draws))
        # 8 degrees of freedom: above 26.1 once in a thousand times.
        assert chi_square(pairs.values(), 9, num_draws) < 26.1


def test_sgd_subtracts_its_share_of_every_direction():
    (record,) = make_records(1, num_directions=3)
    updates = Sgd().step_updates([record], 0, 1)
    changes = updates_of_parameter(updates, None, decays=True)
    assert [change.key for change in changes] == [direction_key(record.key, d) for d in range(3)]
    assert [change.coefficient for change in changes] == [
        record.learning_rate / 3 * gradient for gradient in record.projected_grads
    ]
    assert all(change.factor == 1 for change in changes)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9))
def test_passes_run_every_probe_of_every_micro_batch_once(num_micro_batches, num_probes, probes_per_pass):
    passes = passes_of_step(num_micro_batches, num_probes, probes_per_pass)
    run = [(one.micro_batch, probe) for one in passes for probe in one.probes]
    assert run == [(batch, probe) for batch in range(num_micro_batches) for probe in range(num_probes)]
    assert all(len(one.probes) <= probes_per_pass for one in passes)
    assert len(passes) == num_micro_batches * -(-num_probes // probes_per_pass)


def learning_rates(name, warmup_steps, num_steps=8):
    rates = LearningRates(SCHEDULES[name], peak=0.5, warmup_steps=warmup_steps, num_steps=num_steps)
    return [rates.at(step) for step in range(num_steps)]


def test_the_learning_rates_of_each_schedule_are_these():
    assert learning_rates("constant", 0) == [0.5] * 8
    assert learning_rates("constant", 3) == [0.125, 0.25, 0.375] + [0.5] * 5
    assert learning_rates("linear", 0) == [0.5 * (8 - step) / 8 for step in range(8)]
    assert learning_rates("linear", 4) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.375, 0.25, 0.125])
    cosine = learning_rates("cosine", 4)
    assert cosine[:5] == learning_rates("linear", 4)[:5]
    assert cosine[5:] == pytest.approx([0.5 * (2 + 2**0.5) / 4, 0.25, 0.5 * (2 - 2**0.5) / 4])


def test_a_constant_rate_needs_no_number_of_steps_and_no_step_after_the_last_rises_again():
    constant = LearningRates(SCHEDULES["constant"], peak=0.5, warmup_steps=1)
    assert [constant.at(step) for step in (0, 1, 10**6)] == [0.25, 0.5, 0.5]
    assert LearningRates(SCHEDULES["cosine"], peak=0.5, num_steps=8).at(9) == 0


# Layer policies.


@given(
    st.lists(st.floats(0, 1e300), min_size=1, max_size=30).flatmap(
        lambda weights: st.tuples(st.just(weights), st.integers(0, len(weights)))
    )
)
def test_blocks_are_kept_with_probabilities_as_proportional_as_the_limit_of_1_allows(drawn):
    weights, num_kept = drawn
    found = kept_probabilities(weights, num_kept)
    assert sum(found) == num_kept  # exactly
    assert all(0 <= probability <= 1 for probability in found)
    below = [(Fraction(w), p) for w, p in zip(weights, found, strict=True) if p < 1 and any(weights)]
    for (w, p), (other_w, other_p) in combinations(below, 2):
        assert w * other_p == other_w * p
    certain = [w for w, p in zip(weights, found, strict=True) if p == 1]
    assert not certain or not below or min(certain) >= max(w for w, _ in below)


def test_a_sample_keeps_each_block_as_often_as_its_probability_says_and_weights_it_by_the_inverse():
    probabilities = [Fraction(n, 20) for n in (1, 4, 20, 7, 8)]
    num_draws = 4000
    samples = [weighted_sample(3, step, probabilities) for step in range(num_draws)]
    assert {len(sample.dropped) for sample in samples} == {3}
    kept = Counter(layer for sample in samples for layer in set(range(5)) - set(sample.dropped))
    for layer, probability in enumerate(map(float, probabilities)):
        deviation = (num_draws * probability * (1 - probability)) ** 0.5
        assert abs(kept[layer] - num_draws * probability) <= 3.5 * deviation
    assert {sample.weights for sample in samples} == {tuple(float(Fraction(8, n)) for n in (1, 4, 20, 7, 8))}


def test_any_two_blocks_of_any_distance_are_kept_together():
    probabilities = [Fraction(2, 6)] * 6
    samples = (weighted_sample(3, step, probabilities).dropped for step in range(500))
    assert len({tuple(sorted(set(range(6)) - set(dropped))) for dropped in samples}) == 15


def test_the_sampled_blocks_are_the_recorded_ones():
    policy = Weighted(num_layers=8, num_dropped=5, weights="1, 1, 2, 2, 3, 3, 4, 8")
    found = [policy.sample(0, make_records(step)).dropped for step in range(3)]
    assert found == [(0, 1, 2, 3, 4), (0, 1, 2, 3, 4), (0, 2, 4, 5, 6)]


def test_a_weighted_policy_makes_up_for_how_often_a_block_is_kept():
    sample = Weighted(num_layers=4, num_dropped=2, weights="1,1,2,8").sample(0, ())
    assert sample.weights == (2.0, 2.0, 1.0, 0.5)
    assert 3 not in sample.dropped
    assert Weighted(num_layers=4, num_dropped=2).sample(0, ()).weights == (1.0,) * 4


@pytest.mark.parametrize(
    ("blocks", "kept"), [("0, 2-3", {0, 2, 3}), ("3,1,0", {0, 1, 3}), (" ", {2, 3, 4}), ("2 - 4", {2, 3, 4})]
)
def test_a_fixed_policy_keeps_the_named_blocks_or_the_last_ones(blocks, kept):
    policy = Fixed(num_layers=5, num_dropped=2, blocks=blocks)
    assert {policy.sample(seed, make_records(step)).dropped for seed, step in ((0, 0), (1, 2))} == {
        tuple(sorted(set(range(5)) - kept))
    }


def adalezo_records(gradients):
    """Records of steps of four blocks that keep one block each: a pair of the block and its gradients."""
    return [
        StepRecord(step, 0, tuple(set(range(4)) - {kept}), found, 0.1, 1e-3, 1.0, True)
        for step, (kept, found) in enumerate(gradients)
    ]


def test_adalezo_favors_the_blocks_of_large_projected_gradients():
    policy = AdaLezo(num_layers=4, num_dropped=3, window=2, exploration=0.5)
    assert policy.sample(0, ()).weights == (1.0,) * 4
    gradients = [(0, (9.0,)), (0, (1.0, 1.0)), (1, (3.0, -3.0)), (0, (-1.0,)), (2, (2.0,)), (3, (2.0,))]
    records = adalezo_records(gradients)
    # The scores are 1 (the last two steps that kept block 0), 3, 2 and 2; p is half of score / 8, and 1 / 8.
    expected = tuple(0.25 / (0.5 * score / 8 + 0.125) for score in (1, 3, 2, 2))
    assert policy.sample(0, records).weights == pytest.approx(expected, rel=1e-15)
    # A block that no step has kept counts as the mean of the others, and a skipped step does not count.
    skipped = StepRecord(6, 0, (1, 2, 3), (1e9,), 0.1, 1e-3, 1.0, False)
    assert policy.sample(0, [*records[:5], skipped]).weights == pytest.approx(expected, rel=1e-15)


@given(st.lists(st.tuples(st.integers(0, 3), st.tuples(st.floats(-1e300, 1e300))), max_size=30))
def test_adalezo_bounds_the_factors_whatever_the_gradients_are(gradients):
    sample = AdaLezo(num_layers=4, num_dropped=1, exploration=0.25).sample(0, adalezo_records(gradients))
    assert all(0.75 <= weight <= 4 for weight in sample.weights)


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (
            "fixed",
            {"blocks": "0,1"},
            "got: 0,1; expected: 3 blocks, because 2 of 5 are dropped; fix: set zo.num_",
        ),
        ("fixed", {"blocks": "3-5"}, "expected: different blocks from 0 to 4"),
        ("fixed", {"blocks": "1,1,2"}, "different blocks"),
        ("fixed", {"blocks": "4-2"}, "different blocks"),
        ("fixed", {"blocks": "one"}, "different blocks"),
        ("weighted", {"weights": "1,2"}, "expected: 5 numbers above 0"),
        ("weighted", {"weights": "1,2,3,4,0"}, "5 numbers above 0"),
        ("weighted", {"weights": "1,2,3,4,inf"}, "5 numbers above 0"),
        ("weighted", {"weights": "1,2,3,4,x"}, "5 numbers above 0"),
        ("adalezo", {"window": 0}, "window does not fit; got: 0; expected: at least 1"),
        ("adalezo", {"exploration": 0.0}, "exploration does not fit; got: 0.0; expected: above 0"),
        ("adalezo", {"exploration": 1.5}, "at most 1"),
    ],
)
def test_an_option_of_a_layer_policy_that_does_not_fit_is_refused(policy, options, message):
    with pytest.raises(UserError, match=message):
        LAYER_POLICIES[policy](num_layers=5, num_dropped=2, **options)
