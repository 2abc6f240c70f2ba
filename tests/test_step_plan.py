from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lezo_ds.engine.step_plan import MAX_BLOCKS, PLAN_BYTES, StepPlan

PLANS = st.builds(
    StepPlan,
    step=st.integers(0, 2**63 - 1),
    seed=st.integers(0, 2**64 - 1),
    dropped_layers=st.sets(st.integers(0, MAX_BLOCKS - 1)).map(lambda layers: tuple(sorted(layers))),
    learning_rate=st.floats(allow_nan=False),
    perturbation_scale=st.floats(allow_nan=False),
)


@given(PLANS)
def test_a_plan_comes_back_from_its_bytes_bit_for_bit(plan):
    data = plan.pack()
    assert len(data) == PLAN_BYTES
    assert StepPlan.unpack(data) == plan
    assert StepPlan.unpack(data).pack() == data


def test_the_message_has_the_recorded_bytes():
    plan = StepPlan(3, 2**64 - 1, (0, 7, 8, 255), 1e-6, 1e-3)
    head = struct.pack("<qQdd", 3, 2**64 - 1, 1e-6, 1e-3)
    assert plan.pack() == head + bytes([0x81, 0x01, *[0] * 29, 0x80])


def test_the_message_is_small():
    assert PLAN_BYTES <= 128


def test_a_layer_beyond_the_mask_is_our_own_bug():
    with pytest.raises(OverflowError):
        StepPlan(0, 0, (MAX_BLOCKS,), 1e-6, 1e-3).pack()


def test_noise_seeds_are_the_recorded_ones():
    seeds = [step_key(*key) for key in ((0, 0), (0, 1), (1, 0), (7, 19_999))]
    assert seeds == [0xBFD19E8F440453C6, 0xB4A311AB169D9AE9, 0xB0E18BE79783CF55, 0x61FE77DE3B79821A]


def test_no_two_steps_of_any_run_share_a_noise_seed():
    seeds = {step_key(run, step) for run in range(20) for step in range(1000)}
    assert len(seeds) == 20_000
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_digits_of_run_and_step_do_not_run_together():
    assert step_key(1, 11) != step_key(11, 1)
    assert step_key(12, 3) != step_key(1, 23)
