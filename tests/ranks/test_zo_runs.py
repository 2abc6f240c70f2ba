"""Runs with every registered estimator, policy, update rule and schedule: exact, resumed and replayed."""

from __future__ import annotations

from typing import get_args

import pytest
from ranks import run_ranks
from tiny_runs import start_engine, train, zo_config

from lezo_ds.zo.estimators import ESTIMATORS
from lezo_ds.zo.layers import LAYER_POLICIES
from lezo_ds.zo.schedules import SCHEDULES
from lezo_ds.zo.updates import Distribution

pytestmark = pytest.mark.distributed

NUM_STEPS = 6
PARTS = {
    "estimator": ESTIMATORS,
    "layer_policy": LAYER_POLICIES,
    "weight_decay": (0.0, 0.1),
    "lr_schedule": SCHEDULES,
    "noise_distribution": get_args(Distribution),
    "only_blocks": (False, True),
}
OPTIONS = {"weighted": {"layer_policy_options": {"weights": "1,2,3,6"}}}


def _combine(number):
    """Return a case: part number `number` of each kind, in a circle."""
    names = {kind: list(parts)[number % len(parts)] for kind, parts in PARTS.items()}
    return {"directions": 4, "warmup_steps": 2, **names, **OPTIONS.get(names["layer_policy"], {})}


CASES = [_combine(number) for number in range(max(map(len, PARTS.values())))]
IDS = ["-".join(str(case[kind]) for kind in PARTS) for case in CASES]


def _run_all(directory, num_ranks, dtype, precision):
    """For each case: the records and digest of a run, of its replay, and of one resumed in the middle."""
    found = []
    for case in CASES:
        settings = {"dtype": dtype, "num_ranks": num_ranks, "update_precision": precision, **case}
        engine = start_engine(directory, num_steps=NUM_STEPS, **settings)
        start = engine.weights.digest()
        records = train(engine, NUM_STEPS)
        replayed = engine.with_config(engine._config)
        replayed.load_model(None, 0)
        replayed.load_checkpoint(directory / "none", records)
        replayed_digest = replayed.weights.digest()
        resumed = engine.with_config(engine._config)
        resumed.load_model(None, 0)
        resumed.load_checkpoint(directory / "none", records[: NUM_STEPS // 2])
        again = [*records[: NUM_STEPS // 2], *train(resumed, NUM_STEPS - NUM_STEPS // 2)]
        found.append((records, start, replayed_digest, again, resumed.weights.digest()))
    return found


@pytest.fixture(scope="module", params=[("fp32", "nearest"), ("bf16", "stochastic")], ids=["fp32", "bf16"])
def runs(request, opt_directory):
    """For each rank of 1 and 2: the results of all cases."""
    return [
        results
        for num_ranks in (1, 2)
        for results in run_ranks(_run_all, num_ranks, opt_directory, num_ranks, *request.param)
    ]


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_a_run_is_the_same_on_any_ranks_when_resumed_and_when_replayed(runs, case):
    records, start, *_ = runs[0][case]
    assert all(record.applied for record in records)
    for results in runs:
        own_records, own_start, replayed, again, resumed = results[case]
        assert own_records == again == records
        assert own_start == start
        assert replayed == resumed == runs[0][case][2] != start


@pytest.mark.parametrize(
    ("schedule", "shares"), {"linear": (1, 0.75, 0.5, 0.25), "constant": (1,) * 4}.items()
)
def test_a_record_has_the_learning_rate_of_its_step(runs, schedule, shares):
    found = [records for case, (records, *_) in zip(CASES, runs[0], strict=True) if schedule in case.values()]
    for records in found:
        rates = [record.learning_rate / zo_config().learning_rate for record in records]
        assert rates == pytest.approx([1 / 3, 2 / 3, *shares])
    assert found


def _only_blocks(directory, num_ranks):
    settings = {"only_blocks": True, "noise_distribution": "rademacher", "layer_policy": "window"}
    engine = start_engine(directory, dtype="bf16", num_ranks=num_ranks, directions=2, **settings)
    return train(engine, NUM_STEPS), engine.weights.digest()


def test_a_shared_start_and_signs_give_the_same_bits_on_one_two_and_four_ranks(opt_directory):
    (records, digest), *others = [
        result
        for num_ranks in (1, 2, 4)
        for result in run_ranks(_only_blocks, num_ranks, opt_directory, num_ranks)
    ]
    assert {0 in record.dropped_layers for record in records} == {True, False}
    assert others == [(records, digest)] * 6


def _one_pass(directory, probes_per_pass, num_ranks=1, num_micro_batches=1):
    engine = start_engine(directory, directions=8, probes_per_pass=probes_per_pass, num_ranks=num_ranks)
    return train(engine, 3, num_micro_batches), engine.weights.digest()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_eight_directions_in_one_pass_give_the_bits_of_eight_passes(opt_directory, num_ranks, eight_passes):
    for probes_per_pass in (6, 16):
        for found in run_ranks(_one_pass, num_ranks, opt_directory, probes_per_pass, num_ranks, 4):
            assert found == eight_passes


@pytest.fixture(scope="module")
def eight_passes(opt_directory):
    """The records and digest of a run on one rank, with a pass for each direction."""
    return run_ranks(_one_pass, 1, opt_directory, 2, 1, 4)[0]


def test_all_probes_in_one_pass_are_those_of_passes_of_one(opt_directory):
    ((one, _),), ((all_at_once, _),) = (run_ranks(_one_pass, 1, opt_directory, probes) for probes in (1, 16))
    for left, right in zip(one, all_at_once, strict=True):
        assert right.projected_grads == pytest.approx(left.projected_grads, rel=1e-2, abs=1e-3)
        assert right.loss == pytest.approx(left.loss, rel=1e-5)
