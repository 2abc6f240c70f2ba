from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lezo_ds.step import PlanFormat, StepPlan
from lezo_ds.zo.estimators import Probe

FINITE = st.floats(allow_nan=False)
PROBES = st.lists(st.builds(Probe, direction=st.integers(0, 2**32 - 1), scale=FINITE), max_size=9)


@st.composite
def plans_and_formats(draw):
    num_layers = draw(st.integers(0, 600))
    layers = st.sets(st.integers(0, num_layers - 1)) if num_layers else st.just(set())
    probes, has_weights = draw(PROBES), draw(st.booleans())
    weights = st.lists(FINITE, min_size=num_layers, max_size=num_layers) if has_weights else st.just(())
    plan = StepPlan(
        step=draw(st.integers(0, 2**63 - 1)),
        key=draw(st.integers(0, 2**64 - 1)),
        learning_rate=draw(FINITE),
        perturbation_scale=draw(FINITE),
        dropped_layers=tuple(sorted(draw(layers))),
        layer_weights=tuple(draw(weights)),
        probes=tuple(probes),
    )
    return plan, PlanFormat(num_layers, len(probes), has_weights)


@given(plans_and_formats())
def test_a_plan_comes_back_from_its_bytes_bit_for_bit(drawn):
    plan, plan_format = drawn
    data = plan_format.pack(plan)
    assert len(data) == plan_format.num_bytes
    assert plan_format.unpack(data) == plan
    assert plan_format.pack(plan_format.unpack(data)) == data


def test_the_message_has_the_recorded_bytes():
    plan = StepPlan(3, 2**64 - 1, 1e-6, 1e-3, (0, 7, 8, 9), (), (Probe(0, 1e-3), Probe(0, -1e-3)))
    data = PlanFormat(num_layers=10, num_probes=2).pack(plan)
    probes = struct.pack("<Id", 0, 1e-3) + struct.pack("<Id", 0, -1e-3)
    assert data == struct.pack("<qQdd", 3, 2**64 - 1, 1e-6, 1e-3) + bytes([0x81, 0x03]) + probes


def test_a_layer_beyond_the_model_is_our_own_bug():
    with pytest.raises(OverflowError):
        PlanFormat(8, 0).pack(StepPlan(0, 0, 1e-6, 1e-3, (8,), (), ()))
