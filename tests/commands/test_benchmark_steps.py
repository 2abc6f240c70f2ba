from __future__ import annotations

import copy
import random
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from ranks import run_ranks

from lezo_ds import distributed
from lezo_ds.forward.blocks import find_blocks
from lezo_ds.tools.benchmark import table
from lezo_ds.tools.benchmark.measure import measure_steps
from lezo_ds.tools.benchmark.noise import REFERENCE, measure_noise
from lezo_ds.tools.benchmark.random_inputs import RandomInputs, loss_function, plain_model, split_batch
from lezo_ds.tools.benchmark.reference import plain_steps
from lezo_ds.tools.benchmark.settings import Setting, Variant
from lezo_ds.tools.benchmark.stages import peak_bytes, stage, stage_seconds
from lezo_ds.tools.opt_shapes import opt_config

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
NUM_BLOCKS = 4
VARIANTS = ("mezo_reference:0.5", "naive_zero3", "ours:0", "ours:0.5:1", "ours:0.5:2:2")
SETTING = Setting(
    shape="opt-tiny",
    layers=2,
    ds_config=None,
    partition_size=None,
    dtype="fp32",
    update_precision="fp32_master",
    task="sst2",
    length=8,
    batch=4,
    micro_batches=None,
)


def _measure(setting, names):
    variants = [Variant.parse(name) for name in names]
    return measure_steps(partial(RandomInputs, setting), variants, rounds=2, replay=True)


@pytest.fixture(scope="module", params=[1, 2])
def results(request):
    """What rank 0 measured, and the number of ranks."""
    (rows, *_) = run_ranks(_measure, request.param, SETTING, VARIANTS)
    return table.to_frame(rows), request.param


def test_every_variant_is_measured(results):
    found, num_ranks = results
    steps = found[found.measured == "step"]
    assert list(steps.variant) == list(VARIANTS)
    assert list(steps.sparsity) == [0.5, 0, 0, 0.5, 0.5]
    assert list(steps.fed_tokens) == [64, 64, 32, 32, 32]  # each of the two candidates, or each example
    assert (steps.ranks == num_ranks).all() and (steps.micro_batches == num_ranks).all()
    assert (steps.seconds_min > 0).all() and (steps.seconds_min <= steps.seconds_max).all()
    assert (steps.reference == VARIANTS[0]).all() and (steps.ratio[steps.variant == VARIANTS[0]] == 1).all()
    replays = found[found.measured == "replay"]
    assert list(replays.variant) == list(VARIANTS[2:])
    assert (replays.rounds == 2).all() and (replays.ratio > 0).all()


def test_every_stage_of_a_step_is_seen(results):
    steps = results[0][results[0].measured == "step"]
    for name in ("forward", "perturb", "update", "other"):
        assert (steps[f"{name}_seconds"] > 0).all()
    gathers = ~steps.variant.str.startswith("mezo") & (steps.ranks > 1)
    assert ((steps.gather_seconds > 0) == gathers).all()


def test_our_step_gathers_the_model_once_and_the_naive_one_twice(results):
    found, num_ranks = results
    steps = found[found.measured == "step"]
    times = {"mezo_reference:0.5": 0, "naive_zero3": 2, "ours:0": 1, "ours:0.5:1": 2}
    for variant, expected in times.items():
        rows = steps[steps.variant == variant]
        gathered = (rows.gathered_bytes / (4 * rows.parameters)).astype(float)
        assert list(gathered) == pytest.approx([expected * (num_ranks > 1)], abs=0.02)


def test_a_rank_holds_its_share_of_the_model_or_a_plain_one(results):
    found, num_ranks = results
    steps = found[found.measured == "step"]
    held = (steps.weight_bytes / (4 * steps.parameters)).astype(float)
    is_plain = steps.variant.str.startswith("mezo")
    assert (held[is_plain] == 1).all()
    assert list(held[~is_plain]) == pytest.approx([1 / num_ranks] * (~is_plain).sum(), rel=0.01)


def test_replicas_gather_nothing():
    (row, *_) = run_ranks(_measure, 2, replace(SETTING, partition_size=1), ["naive_zero3"])[0]
    assert row["gathered_bytes"] == 0
    assert row["weight_bytes"] == 4 * row["parameters"]


def _noise_rows():
    return measure_noise("bf16", 1000, rounds=2)


def test_the_noise_is_compared_with_a_copy_and_with_torch():
    (rows,) = run_ranks(_noise_rows, 1)
    found = table.to_frame(rows).set_index("variant")
    copies = {"copy", "copy to new memory"}
    operations = {"perturb", "perturb_pair", "update, nearest", "update, stochastic", "update, fp32_master"}
    signs = {f"{operation}, rademacher" for operation in operations}
    assert copies | operations | signs | {"normal, fp32", "rademacher, fp32"} <= set(found.index)
    assert found.ratio[REFERENCE] == 1
    copied = 4 * 1000 / found.seconds_median["copy"]
    assert found.bytes_per_second["copy"] == pytest.approx(copied)


@torch.no_grad()
def independent_step(model, num_dropped, zo):
    """Return (g, weights after the step) from all z kept in memory: MeZO's formulas, without restoring."""
    seed = random.Random(0).randrange(10**9)
    dropped = random.Random(seed).sample(range(NUM_BLOCKS), num_dropped)
    layout = find_blocks(model)
    theta = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    z = {
        name: torch.normal(0.0, 1.0, values.shape, generator=generator, dtype=values.dtype)
        for name, values in theta.items()
        if layout.block_of(name) not in dropped
    }
    (batch,) = split_batch(SETTING.workload, 1, published=True)

    def loss(scale):
        moved = {name: values + scale * z.get(name, 0) for name, values in theta.items()}
        logits = torch.func.functional_call(model, moved, kwargs=dict(batch.inputs)).logits
        wanted = logits[batch.selection.rows, batch.selection.positions]
        return loss_function(SETTING.workload)(wanted, batch).sum() / batch.weight

    g = (loss(zo.perturbation_scale) - loss(-zo.perturbation_scale)) / (2 * zo.perturbation_scale)
    return float(g), {name: values - zo.learning_rate * g * z.get(name, 0) for name, values in theta.items()}


def _reference_step(text):
    distributed.init_distributed()
    variant = Variant.parse(text)
    model = plain_model(opt_config("opt-tiny", NUM_BLOCKS), "fp32", CPU).double()
    before = copy.deepcopy(model)
    inputs = RandomInputs(SETTING)
    gradient = plain_steps(variant, model, inputs).step()
    expected = independent_step(before, round(variant.sparsity * NUM_BLOCKS), inputs.zo)
    return before.state_dict(), expected, (gradient, dict(model.named_parameters()))


@pytest.mark.parametrize("text", ["mezo_reference", "mezo_reference:0.75"])
def test_the_reference_does_the_step_of_mezo_and_with_dropped_blocks_of_lezo(text):
    ((before, (expected_gradient, expected), (gradient, found)),) = run_ranks(_reference_step, 1, text)
    assert gradient == pytest.approx(expected_gradient, rel=1e-6)
    num_moved = 0
    for name, values in found.items():
        # The update is small: it is compared with itself, not with the weight that it changes.
        change, wanted = values - before[name], expected[name] - before[name]
        torch.testing.assert_close(change, wanted, rtol=1e-4, atol=1e-15)
        num_moved += not torch.equal(values, before[name])
    assert (num_moved == len(found)) == (":" not in text)


def test_ranks_share_the_batch_of_the_reference():
    ((_, _, (alone, _)),) = run_ranks(_reference_step, 1, "mezo_reference")
    both = [gradient for _, _, (gradient, _) in run_ranks(_reference_step, 2, "mezo_reference")]
    assert both == pytest.approx([alone, alone], rel=1e-4)  # the losses are float32


class Worker:
    def work(self):
        with stage("gather"):
            time.sleep(0.02)
        time.sleep(0.01)


def _stages_and_peak():
    distributed.init_distributed()
    seconds = stage_seconds(lambda: Worker().work(), [(Worker, "work", "forward")])
    plain = stage_seconds(Worker().work)
    return seconds, plain, peak_bytes(lambda: torch.ones(64 * 2**20, dtype=torch.uint8).sum())


def test_stages_exclude_each_other_and_a_peak_is_seen_after_it_is_gone():
    ((seconds, plain, peak),) = run_ranks(_stages_and_peak, 1)
    assert seconds["gather_seconds"] >= 0.02 and plain["gather_seconds"] >= 0.02
    assert seconds["forward_seconds"] >= 0.01 and plain["forward_seconds"] == 0
    assert plain["other_seconds"] >= 0.01
    assert sum(seconds.values()) < 10
    assert peak is None or peak > 32 * 2**20
