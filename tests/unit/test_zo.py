"""Keys, estimators, layer policies and schedules have recorded values, formulas and statistics."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from reference import estimate_groups

from lezo_ds.config import ZoConfig, make_estimator
from lezo_ds.errors import UserError
from lezo_ds.zo.estimators import ESTIMATORS, Estimate, Probe, Spsa, mean_losses
from lezo_ds.zo.keys import direction_key, layer_order, step_key
from lezo_ds.zo.layers import Fixed, LayerSample, Uniform
from lezo_ds.zo.passes import Groups
from lezo_ds.zo.schedules import SCHEDULES, LearningRates, Schedule

NUM_LAYERS = 5
WIDTH = 6
NAN = float("nan")
UNBIASED = ("spsa", "one-sided")


def test_keys_are_the_recorded_ones_and_no_two_steps_or_directions_share_one():
    keys = [step_key(*run) for run in ((0, 0), (0, 1), (1, 0), (7, 19_999))]
    assert keys == [0xBFD19E8F440453C6, 0xB4A311AB169D9AE9, 0xB0E18BE79783CF55, 0x61FE77DE3B79821A]
    assert len({step_key(run, step) for run in range(20) for step in range(1000)}) == 20_000
    directions = [direction_key(77, direction) for direction in range(1000)]
    assert directions[0] == 77
    assert len(set(directions)) == 1000
    assert all(0 <= key < 2**64 for key in directions)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimates_of_groups_are_those_of_the_formulas(name):
    estimator = ESTIMATORS[name](perturbation_scale=0.5, num_directions=4)
    probes = estimator.probes(())
    rng = np.random.default_rng(3)
    losses = rng.normal(size=(3, len(probes))).tolist()
    losses[1] = [1.0 + 1e-9 * loss for loss in losses[1]]  # an example to which z hardly matters
    estimate = estimator.estimate_groups(probes, losses)
    loss, gradients = estimate_groups(name, 0.5, losses)
    assert estimate.loss == pytest.approx(loss, rel=1e-12)
    assert estimate.projected_grads == pytest.approx(gradients, rel=1e-6, abs=1e-12)
    equal = estimator.estimate_groups(probes, [[0.1] * len(probes)] * 2)
    assert equal.projected_grads == (0.0,) * 8


def test_sums_are_rounded_term_by_term_in_order():
    # Compensated or exact summation would give 2**-53 + 2**-53 = 2**-52 next to the 1.
    tiny = 2.0**-53
    assert mean_losses([1.0, tiny, tiny], 1, 1.0) == [1.0]
    assert mean_losses([tiny, tiny, 1.0], 1, 1.0) == [1.0 + 2.0**-52]
    assert mean_losses([6.0, 3.0, 2.0, 1.0], 2, 4) == [2.0, 1.0]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("signs", [False, True])
def test_estimates_point_along_the_gradient_on_average_and_are_unbiased_or_normalized(name, signs):
    rng = np.random.default_rng(1)
    estimator = ESTIMATORS[name](1e-3, 4)
    probes, gradient = estimator.probes(()), np.arange(1.0, WIDTH + 1)
    estimates = np.zeros((3000, WIDTH))
    for estimate in estimates:
        z = rng.choice([-1.0, 1.0], size=(4, WIDTH)) if signs else rng.normal(size=(4, WIDTH))
        losses = [3 + probe.scale * z[probe.direction] @ gradient for probe in probes]
        gradients = estimator.estimate(probes, losses).projected_grads
        # Only a normalized estimate does not change with the scale of the loss.
        scaled = estimator.estimate(probes, [4 * loss for loss in losses]).projected_grads
        factor = 4 if name in UNBIASED else 1
        assert scaled == pytest.approx([factor * each for each in gradients])
        estimate[:] = np.mean(np.array(gradients)[:, None] * z, axis=0)
    mean = estimates.mean(axis=0)
    assert mean @ gradient > 0.97 * np.linalg.norm(mean) * np.linalg.norm(gradient)
    if name in UNBIASED:
        scores = (mean - gradient) / (estimates.std(axis=0) / len(estimates) ** 0.5)
        assert np.sqrt((scores**2).mean()) < 1.96  # above it once in a thousand times


def learning_rates(name, warmup_steps, num_steps=8):
    rates = LearningRates(SCHEDULES[name], peak=0.5, warmup_steps=warmup_steps, num_steps=num_steps)
    return [rates.at(step) for step in range(num_steps)]


def test_the_learning_rates_of_each_schedule_are_these():
    assert learning_rates("constant", 3) == [0.125, 0.25, 0.375] + [0.5] * 5
    assert learning_rates("linear", 0) == [0.5 * (8 - step) / 8 for step in range(8)]
    linear = learning_rates("linear", 4)
    assert linear == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.375, 0.25, 0.125])
    cosine = learning_rates("cosine", 4)
    assert cosine[:5] == linear[:5]
    assert cosine[5:] == pytest.approx([0.5 * (2 + 2**0.5) / 4, 0.25, 0.5 * (2 - 2**0.5) / 4])
    assert LearningRates(SCHEDULES["cosine"], peak=0.5, num_steps=8).at(9) == 0


@pytest.mark.parametrize("share", [float("nan"), -0.1, 1.1])
def test_a_schedule_of_ones_own_gives_a_share_from_0_to_1(share):
    with pytest.raises(ValueError, match="is not from 0 to 1"):
        LearningRates(Schedule(lambda _: share), peak=0.5, num_steps=2).at(1)


@pytest.mark.parametrize("probes", [[], [(0, 1)], [Probe(1, 1)], [Probe(-1, 1)], [Probe(0, NAN)]])
def test_probes_of_ones_own_of_no_direction_are_refused(probes, monkeypatch):
    monkeypatch.setattr(Spsa, "probes", lambda *_: probes)
    with pytest.raises(UserError, match=r"Spsa returned the probes .* the directions 0 to 0; "):
        make_estimator(ZoConfig())


def test_numbers_of_ones_own_components_may_be_numpys(monkeypatch):
    monkeypatch.setattr(Spsa, "estimate", lambda *_: Estimate(1.0, np.array([2.0])))
    assert Spsa(1.0).estimate_groups([], [[], []]).projected_grads == (2.0, 2.0)
    monkeypatch.setattr(Uniform, "sample", lambda *_: LayerSample(tuple(np.arange(2))))
    assert str(Uniform(5, 2).checked_sample(1, []).dropped) == "(0, 1)"
    assert LearningRates(Schedule(np.float32), peak=0.5, num_steps=2).at(1) == 0.25


def test_a_sample_of_ones_own_that_names_no_groups_is_refused(monkeypatch):
    policy = Uniform(num_layers=5, num_dropped=2)
    assert policy.checked_sample(1, []) == policy.sample(1, [])
    for wrong in ((0, 2), LayerSample((2, 0)), LayerSample((7,)), LayerSample((0,), (1.0,) * 7)):
        monkeypatch.setattr(Uniform, "sample", lambda *_, wrong=wrong: wrong)
        with pytest.raises(UserError, match=r"Uniform returned .* the model has 7 groups to drop"):
            policy.checked_sample(1, [])


def test_uniform_samples_are_the_recorded_ones():
    for step, kept in enumerate([(0, 3, 5, 9, 16, 18), (1, 4, 9, 17, 19, 20)]):
        sample = Uniform(24, 18).sample(0, [None] * step)
        assert sample.dropped == tuple(layer for layer in range(24) if layer not in kept)


def test_a_fixed_policy_keeps_the_named_blocks_or_the_last_ones():
    for blocks, dropped in (("0, 2-3", (1, 4)), (" ", (0, 1))):
        policy = Fixed(num_layers=5, num_dropped=2, blocks=blocks)
        assert tuple(policy.sample(1, []).dropped) == dropped


def chi_square(counts, num_cells, num_draws):
    expected = num_draws / num_cells
    return sum((count - expected) ** 2 / expected for count in counts)


def test_every_subset_is_equally_likely_and_neighboring_steps_and_seeds_are_independent():
    def dropped(seed, step, num_layers, num_dropped):
        return tuple(sorted(layer_order(seed, step, num_layers)[:num_dropped]))

    counts = Counter(dropped(11, step, 5, 2) for step in range(6000))
    assert set(counts) == set(combinations(range(5), 2))
    # 9 degrees of freedom: above 27.9 once in a thousand times. 8 below: above 26.1.
    assert chi_square(counts.values(), 10, 6000) < 27.9
    for seed, shift in ((11, 1), (12, 0)):
        pairs = Counter(
            dropped(11, step, 3, 1) + dropped(seed, step + shift, 3, 1) for step in range(6000)
        )
        assert chi_square(pairs.values(), 9, 6000) < 26.1


def test_groups_of_16_examples_lie_in_micro_batches():
    found = {(parts, size): Groups.of(parts, 16, size) for parts, size in ((2, 8), (2, 4), (4, 8))}
    assert found == {(2, 8): (2, 1, 2), (2, 4): (4, 2, 2), (4, 8): (2, 1, 4)}
    assert Groups.of(2, 16, None) == Groups.of(2, 16, 16) == (1, 1, 2)
    assert [[*found[4, 8].of_micro_batch(index)] for index in range(4)] == [[0], [0], [1], [1]]
    assert [[*found[2, 4].of_micro_batch(index)] for index in range(2)] == [[0, 1], [2, 3]]
    for num_examples, parts, wrong in [(4, 1, 3), (0, 2, 1), (None, 2, 1), (12, 3, 6)]:
        with pytest.raises(UserError, match=f"zo.examples_per_direction={wrong} does not divide"):
            Groups.of(parts, num_examples, wrong)
