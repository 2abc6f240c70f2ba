from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lezo_ds.engine.estimator import Estimate, estimate, is_outlier

LOSSES = st.lists(
    st.tuples(st.floats(0, 1e3, width=32), st.floats(0, 1e3, width=32)), min_size=1, max_size=40
)


@given(LOSSES, st.floats(1, 1e4), st.floats(1e-4, 1))
def test_the_estimate_is_the_exact_one_to_float64_rounding(losses, weight, scale):
    plus, minus = zip(*losses, strict=True)
    found = estimate(plus, minus, weight, scale)
    exact_plus, exact_minus = (sum(map(Fraction, side)) / Fraction(weight) for side in (plus, minus))
    assert math.isclose(found.loss_plus, exact_plus, rel_tol=1e-13, abs_tol=0)
    assert math.isclose(found.loss_minus, exact_minus, rel_tol=1e-13, abs_tol=0)
    exact = (exact_plus - exact_minus) / (2 * Fraction(scale))
    rounding = 1e-13 * float(exact_plus + exact_minus) / scale
    assert abs(found.projected_gradient - float(exact)) <= rounding
    assert found.loss == (found.loss_plus + found.loss_minus) / 2


def test_sums_are_rounded_term_by_term_in_the_given_order():
    # Compensated or exact summation would find 2**-53 + 2**-53 = 2**-52 beside the 1.
    tiny = 2.0**-53
    assert estimate([1.0, tiny, tiny], [0.0], 1.0, 0.5).loss_plus == 1.0
    assert estimate([tiny, tiny, 1.0], [0.0], 1.0, 0.5).loss_plus == 1.0 + 2.0**-52


def test_of_a_line_it_gives_the_slope_and_of_a_parabola_the_derivative():
    for scale in (1e-3, 1e-1, 1.0):
        line = estimate([5 + 3 * scale], [5 - 3 * scale], 1, scale)
        assert line.projected_gradient == pytest.approx(3, rel=1e-11)
        assert line.loss == pytest.approx(5)
        parabola = estimate([(2 + scale) ** 2], [(2 - scale) ** 2], 1, scale)
        assert parabola.projected_gradient == pytest.approx(4, rel=1e-11)
        assert parabola.loss == pytest.approx(4 + scale**2)


def test_the_loss_is_a_mean_over_the_weight_of_all_micro_batches():
    found = estimate([6.0, 2.0], [3.0, 1.0], 4, 0.5)
    assert found == Estimate(loss_plus=2.0, loss_minus=1.0, projected_gradient=1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["plus", "minus", "both"])
def test_any_loss_that_is_not_finite_makes_the_step_not_applicable(bad, side):
    plus = [1.0, bad if side != "minus" else 2.0]
    minus = [1.0, bad if side != "plus" else 2.0]
    assert not estimate(plus, minus, 2, 1e-3).is_finite


def test_finite_losses_make_the_step_applicable():
    assert estimate([1.0], [2.0], 1, 1e-3).is_finite


def test_an_outlier_is_beyond_so_many_times_the_median_of_enough_steps():
    recent = [1.0] * 10 + [3.0] * 10  # median 2
    assert not is_outlier(8.0, recent, 4)
    assert is_outlier(math.nextafter(8.0, 9), recent, 4)
    assert is_outlier(8.1, [*recent, 1e30], 2)  # one huge step does not raise the bar
    assert not is_outlier(1e30, recent[1:], 4)
    assert not is_outlier(1e30, recent, None)
