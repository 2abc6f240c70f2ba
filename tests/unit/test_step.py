"""A step's plan as bytes, and the proof in its all-reduce that all ranks agree."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace

import pytest
import torch

from lezo_ds.agreement import (
    all_agree,
    assert_same,
    batch_claims,
    batch_digest,
    claim_numbers,
    desync_error,
    disagreement,
)
from lezo_ds.data.examples import Example
from lezo_ds.engine import LezoEngine, check_losses
from lezo_ds.errors import DesyncError, UserError
from lezo_ds.forward.batch import LogitSelection, MicroBatch, StepBatch
from lezo_ds.forward.dense import DenseDirections
from lezo_ds.noise import Elements, Weight
from lezo_ds.zo.estimators import Estimate, Probe, Spsa
from lezo_ds.zo.laws import DenseLaw
from lezo_ds.zo.passes import Groups, KeyedProbe
from lezo_ds.zo.records import StepPlan
from lezo_ds.zo.step import PlanFormat, Step

CLAIMS = {"plan": "a", "batch": "b"}


@pytest.mark.parametrize("weights", [(), tuple(index / 3 for index in range(10))])
def test_a_plan_has_the_recorded_bytes_and_comes_back_from_them(weights):
    plan = StepPlan(3, 2**64 - 1, (0, 7, 8, 9), 1e-6, 1e-3, weights)
    probes = (Probe(0, 1e-3), Probe(2**32 - 1, -1e-3))
    plan_format = PlanFormat(num_groups=10, num_probes=2, has_weights=bool(weights))
    data = plan_format.pack(plan, probes)
    bytes_of_probes = struct.pack("<Id", 0, 1e-3) + struct.pack("<Id", 2**32 - 1, -1e-3)
    head = struct.pack("<qQdd", 3, 2**64 - 1, 1e-6, 1e-3) + bytes([0x81, 0x03])
    assert data == head + bytes_of_probes + struct.pack(f"<{len(weights)}d", *weights)
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


def test_a_hash_of_claims_changes_with_any_of_them():
    others = [CLAIMS, CLAIMS | {"plan": "b"}, CLAIMS | {"batch": "a"}, {"plan": "a;batch:b"}]
    hashes = [tuple(claim_numbers(claims)) for claims in others]
    assert len(set(hashes)) == 4
    assert all(len(numbers) == 4 for numbers in hashes)
    assert all(
        number.is_integer() and 0 <= number < 2**40 for numbers in hashes for number in numbers
    )


def sums_of(by_rank):
    """Return what an all-reduce in float64 gives, in an order of its own."""
    return (
        torch.tensor([claim_numbers(claims) for claims in by_rank], dtype=torch.float64)
        .sum(dim=0)
        .tolist()
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 64, 8192])
def test_sums_over_the_ranks_tell_whether_all_state_the_same(num_ranks):
    rank, other = num_ranks // 2, {"plan": str(num_ranks), "batch": "b"}
    same = [CLAIMS] * num_ranks
    assert all_agree(sums_of(same), num_ranks)
    if num_ranks > 1:
        assert not all_agree(sums_of([*same[:rank], other, *same[rank + 1 :]]), num_ranks)
        assert not all_agree(
            sums_of([{"rank": str(index)} for index in range(num_ranks)]), num_ranks
        )
    largest = float(2**20 - 1)  # the largest numbers are exact, too
    numbers = (
        torch.tensor([[largest, largest**2]], dtype=torch.float64).expand(num_ranks, 2).clone()
    )
    assert all_agree(numbers.sum(dim=0).tolist(), num_ranks)
    numbers[rank] = torch.tensor([largest - 1, (largest - 1) ** 2])
    assert num_ranks == 1 or not all_agree(numbers.sum(dim=0).tolist(), num_ranks)


def selecting(position, vocabulary=None):
    """Return a batch of one sequence that needs the logits at one position."""
    selection = LogitSelection(torch.tensor([0]), torch.tensor([position]), vocabulary)
    return [replace(batch_of(1, 2)[0], selection=selection)]


def test_a_digest_of_a_batch_sees_tokens_labels_weights_order_and_the_needed_logits():
    batches = [
        batch_of(1, 2),
        batch_of(2, 1),
        batch_of(1, 2, weight=2.0),
        batch_of(1, 2, label=1),
        batch_of(1) + batch_of(2),
        batch_of(2) + batch_of(1),
        selecting(0),
        selecting(1),
        selecting(1, torch.tensor([3])),
    ]
    assert len({batch_digest(batch) for batch in batches}) == len(batches)
    assert batch_digest(batch_of(1, 2)) == batch_digest(batch_of(1, 2))


def test_a_batch_is_known_by_the_indices_of_its_rows_or_else_by_its_tensors():
    """What a rank states of a batch that a run lays out needs no layout."""

    def claims(content, num_micro_batches=2):
        weights = [1.0] * num_micro_batches
        return batch_claims(StepBatch(weights, batch_of(1).__getitem__, content, len(weights)))

    assert len({repr(claims(b"a")), repr(claims(b"b")), repr(claims(b"a", 3))}) == 3
    own = [batch_claims(StepBatch.of(batch_of(token))) for token in (1, 1, 2)]
    assert own[0] == own[1] != own[2]


def test_ranks_that_start_from_other_records_are_named():
    assert_same("training records", ["a", "a", "a"])
    with pytest.raises(DesyncError, match="rank 1 has another training records: b, but most"):
        assert_same("training records", ["a", "b", "a"])


def test_a_batch_of_ones_own_counts_its_examples():
    rows = torch.zeros(6, 3, dtype=torch.int64)
    bare = MicroBatch({"input_ids": rows}, 6)
    assert bare.num_examples == 6
    packed = replace(bare, token_examples=torch.tensor([[0, 0, 1]] * 6))
    assert packed.num_examples == 2
    named = replace(packed, examples=(Example("", (), None, 0),) * 3)
    assert named.num_examples == 3
    assert StepBatch.of([bare, bare]).num_examples == 12
    assert StepBatch.of([bare, named]).num_examples is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ids: StepBatch.of([]), "no list of MicroBatch objects; fix: pass"),
        (lambda ids: StepBatch.of([{"input_ids": ids}]), "no list of MicroBatch objects"),
        (lambda ids: StepBatch.of(MicroBatch({"input_ids": ids}, 1)), "no list of MicroBatch"),
        (lambda ids: MicroBatch({"input_ids": ids.tolist()}, 1), "the inputs of .* no tensor"),
        (lambda ids: MicroBatch({"input_ids": ids}, 1, ids), "the labels of .* type Tensor"),
        (lambda ids: MicroBatch({"input_ids": ids}, math.nan), "the weight of .* is nan"),
        (lambda ids: MicroBatch({"input_ids": ids}, -7), "the weight of .* is -7"),
    ],
)
def test_a_batch_of_another_form_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make(torch.ones((1, 2), dtype=torch.int64))


def test_what_is_not_one_loss_for_each_example_is_refused():
    batch = MicroBatch({"input_ids": torch.zeros(4, 3, dtype=torch.int64)}, 2)
    for losses in (torch.zeros(4), torch.zeros(4, 2)):  # of examples, or of their tokens
        check_losses(losses, batch)
    for losses, shown in (
        (torch.tensor(1.5), r"\(\)"),  # a mean, as models of transformers return it
        (torch.ones(1), r"\(1,\)"),
        (torch.ones(2), r"\(2,\)"),
        ([0.5] * 4, "list"),
        (None, "NoneType"),
    ):
        with pytest.raises(UserError, match=f"returned {shown}, not one loss for each of 4 exam"):
            check_losses(losses, batch)


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
    for num_returned in (2, 1):
        estimator = OfTensors(0.5, num_directions=2, num_returned=num_returned)
        step = Step(plan, estimator.probes(()), estimator, Groups(1, 1, 1), 4, total_weight=2)
        if num_returned == 2:
            record = step.estimate([8, 4, 2, 6])
            assert (record.projected_grads, record.loss) == ((2.0, -2.0), 2.5)
            assert {type(x) for x in (*record.projected_grads, record.loss)} == {float}
        else:
            with pytest.raises(UserError, match=r"returned 1 projected .*, and the .* 2 directio"):
                step.estimate([8, 4, 2, 6])


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
    assert not replace(step, may_lack_losses=False).estimate(losses.tolist()).applied


def test_a_weight_that_is_a_tensor_is_a_number():
    ids = torch.zeros(2, 3, dtype=torch.int64)
    weight = StepBatch.of([MicroBatch({"input_ids": ids}, torch.ones(2, 3).sum())]).total_weight
    assert (type(weight), weight) == (float, 6.0)


def test_a_copy_of_a_weight_has_no_directions_of_groups():
    """It would be of the first group's direction alone."""
    probe = KeyedProbe((1, 2), 0.5)
    directions = DenseDirections(DenseLaw())
    weight = Weight(torch.zeros(3), Elements.all_of(0, [3]), torch.float32)
    with pytest.raises(ValueError, match="serves all examples"):
        directions.perturb([weight], [probe])


def test_errors_name_the_rank_that_differs_from_most_and_count_what_is_too_much_to_name():
    text = str(disagreement(7, [CLAIMS | {"batch": "x"}, CLAIMS, CLAIMS], 7))
    assert (
        "at step 7: rank 0 has another batch: x, but most ranks have b; last good step: 6" in text
    )
    error = desync_error("wrong", [f"on rank {rank} w changed" for rank in range(6)], 3, fix="look")
    assert error.exit_code == 5
    assert "on rank 3 w changed; and 2 more; last good step: 2" in str(error)


@pytest.mark.parametrize("plans", ["ax", "aaxx", "axya"])
def test_without_a_majority_no_rank_is_blamed(plans):
    text = str(disagreement(0, [CLAIMS | {"plan": plan} for plan in plans], 0))
    by_rank = "; ".join(f"rank {rank} has {plan}" for rank, plan in enumerate(plans))
    assert f"at step 0: the ranks differ in plan: {by_rank}; last good step: none" in text
    assert "most ranks" not in text
