"""A step's plan as bytes, and the proof in its all-reduce that all ranks agree."""

import math
import struct
from dataclasses import dataclass, replace

import pytest
import torch

from lezo_ds.agreement import all_agree, assert_same, batch_claims, batch_digest, claim_numbers
from lezo_ds.engine import LezoEngine
from lezo_ds.errors import DesyncError, UserError
from lezo_ds.forward.batch import LogitSelection, MicroBatch, StepBatch
from lezo_ds.zo.estimators import Estimate, Probe, Spsa
from lezo_ds.zo.passes import Groups
from lezo_ds.zo.records import StepPlan
from lezo_ds.zo.step import PlanFormat, Step

CLAIMS = {"plan": "a", "batch": "b"}


def test_a_plan_has_the_recorded_bytes_and_comes_back_from_them():
    weights = tuple(index / 3 for index in range(10))
    plan = StepPlan(3, 2**64 - 1, (0, 7, 8, 9), 1e-6, 1e-3, weights)
    probes = (Probe(0, 1e-3), Probe(2**32 - 1, -1e-3))
    plan_format = PlanFormat(num_groups=10, num_probes=2, has_weights=True)
    data = plan_format.pack(plan, probes)
    head = struct.pack("<qQdd", 3, 2**64 - 1, 1e-6, 1e-3) + bytes([0x81, 0x03])
    of_probes = struct.pack("<IdId", 0, 1e-3, 2**32 - 1, -1e-3)
    assert data == head + of_probes + struct.pack("<10d", *weights)
    assert len(data) == plan_format.num_bytes
    assert plan_format.unpack(data) == (plan, probes)


class Growing(Spsa):
    """An estimator of a user's that has one more probe at each step."""

    def probes(self, records):
        return super().probes(records) + (Probe(0, 0.0),) * len(records)


def test_an_estimator_whose_number_of_probes_varies_is_refused_by_its_name():
    engine = LezoEngine.__new__(LezoEngine)
    engine.estimator = Growing(1e-3)
    engine.plan_format = PlanFormat(2, num_probes=2, has_weights=False)
    engine.global_steps = 1
    engine.records = []
    assert len(engine._probes()) == 2
    engine.records = [None]
    with pytest.raises(UserError, match="Growing has 3 probes at step 1 and 2 at step 0; fix: "):
        engine._probes()


def batch_of(*ids, weight=1.0, label=0):
    return [MicroBatch({"input_ids": torch.tensor([ids])}, weight, {"label": torch.tensor(label)})]


def agree(numbers):
    """Return what the ranks conclude from an all-reduce in float64, in an order of its own."""
    sums = torch.tensor(numbers, dtype=torch.float64).sum(dim=0)
    return all_agree(sums.tolist(), len(numbers))


def state_same(by_rank):
    return agree([claim_numbers(claims) for claims in by_rank])


@pytest.mark.parametrize("num_ranks", [2, 3, 8192])
def test_sums_over_the_ranks_tell_whether_all_state_the_same(num_ranks):
    same = [CLAIMS] * (num_ranks - 1)
    assert state_same([*same, CLAIMS])
    for other in (CLAIMS | {"plan": "b"}, CLAIMS | {"batch": "a"}, {"plan": "a;batch:b"}):
        assert not state_same([*same, other])
    assert not state_same([{"rank": str(rank)} for rank in range(num_ranks)])
    # The largest numbers are exact, too.
    largest = [(2**20 - 1, (2**20 - 1) ** 2)] * num_ranks
    assert agree(largest)
    assert not agree([*largest[1:], (2**20 - 2, (2**20 - 2) ** 2)])


def test_a_digest_of_a_batch_sees_tokens_labels_weights_order_and_the_needed_logits():
    (batch,) = batch_of(1, 2)
    place = torch.tensor([0])
    selections = [LogitSelection(place, place), LogitSelection(place, place + 1)]
    selections.append(LogitSelection(place, place, torch.tensor([3])))
    batches = [[replace(batch, selection=selection)] for selection in selections]
    batches += [[batch], batch_of(2, 1), batch_of(1, 2, weight=2.0), batch_of(1, 2, label=1)]
    batches += [batch_of(1) + batch_of(2), batch_of(2) + batch_of(1)]
    assert len({batch_digest(batch) for batch in batches}) == len(batches)
    assert batch_digest(batch_of(1, 2)) == batch_digest(batch_of(1, 2))


def test_a_batch_is_known_by_the_indices_of_its_rows_or_else_by_its_tensors():
    """What a rank states of a batch that a run lays out needs no layout."""
    laid_out = [
        batch_claims(StepBatch([1.0] * count, batch_of(1).__getitem__, content, count))
        for content, count in ((b"a", 2), (b"b", 2), (b"a", 3))
    ]
    assert len(set(map(repr, laid_out))) == 3
    own = [batch_claims(StepBatch.of(batch_of(token))) for token in (1, 1, 2)]
    assert own[0] == own[1] != own[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ids: StepBatch.of([]), "not a list of MicroBatch objects; fix: pass"),
        (lambda ids: MicroBatch({"input_ids": ids.tolist()}, 1), "the inputs of .* not a tensor"),
        (lambda ids: MicroBatch({"input_ids": ids}, 1, ids), "the labels of .* type Tensor"),
        (lambda ids: MicroBatch({"input_ids": ids}, math.nan), "the weight of .* is nan"),
    ],
)
def test_a_batch_of_another_form_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make(torch.ones((1, 2), dtype=torch.int64))


@dataclass(frozen=True)
class OfTensors(Spsa):
    """An estimator of a user's."""

    num_returned: int = 2

    def estimate(self, probes, losses):
        plus, minus = torch.tensor(losses, dtype=torch.float64).view(-1, 2).T
        gradients = (plus - minus) / (2 * self.perturbation_scale)
        return Estimate(torch.tensor(losses).mean(), tuple(gradients[: self.num_returned]))


def test_an_estimator_may_return_tensors_and_must_estimate_each_direction():
    plan = StepPlan(0, 1, (), 1e-6, 1e-3)
    steps = []
    for num_returned in (2, 1):
        estimator = OfTensors(0.5, num_directions=2, num_returned=num_returned)
        probes = estimator.probes(())
        steps.append(Step(plan, probes, estimator, Groups(1, 1, 1), 4, total_weight=2))
    record = steps[0].estimate([8, 4, 2, 6])
    assert (record.projected_grads, record.loss) == ((2.0, -2.0), 2.5)
    assert {type(x) for x in (*record.projected_grads, record.loss)} == {float}
    with pytest.raises(UserError, match=r"returned 1 projected .*, and the .* 2 directio"):
        steps[1].estimate([8, 4, 2, 6])


def test_answers_that_no_reward_judges_give_no_direction_an_advantage():
    """Of two groups with two directions each."""
    estimator = Spsa(0.5, num_directions=2)
    probes = estimator.probes(())
    groups = Groups(2, 2, 1)
    plan = StepPlan(0, 1, (), 1e-6, 0.5)
    step = Step(plan, probes, estimator, groups, 4, total_weight=4, may_lack_losses=True)
    nan = math.nan
    of_probes = [[1, 3, nan, nan], [2, nan, 0, 4], [nan, nan, 2, 2], [4, 4, nan, 6]]
    losses = torch.zeros(step.num_losses, dtype=torch.float64)
    step.add(losses, step.passes[0], list(map(torch.tensor, of_probes)))
    judged = [4, 4, nan, 8, nan, 4, 4, 12]  # the mean of those that have a loss, for both
    assert torch.equal(losses.nan_to_num(-1), torch.tensor(judged).nan_to_num(-1).double())
    record = step.estimate(losses.tolist())
    mean = (4 + 4 + 8) / 3
    other = (4 + 4 + 12) / 3
    expected = [0, (mean - 8) / 2, (other - 4) / 2, (4 - 12) / 2]
    assert record.applied
    assert record.projected_grads == pytest.approx(expected)
    record = step.estimate([nan] * 4 + [4, 8, 4, 4])  # no answer of the first group is judged
    assert record.projected_grads == (0, 0, -2, 0)
    assert record.loss == 2.5
    assert not step.estimate([nan] * 8).applied
    assert step._filled([nan, 0.1, 0.1, 0.1])[0] == (0.1 + 0.1 + 0.1) / 3  # not as `sum` adds
    assert not replace(step, may_lack_losses=False).estimate(losses.tolist()).applied


def test_ranks_that_start_from_other_records_are_named():
    with pytest.raises(DesyncError, match="rank 1 has another training records: b, but most"):
        assert_same("training records", ["a", "b", "a"])
