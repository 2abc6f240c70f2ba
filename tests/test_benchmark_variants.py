from __future__ import annotations

import copy

import pytest
import torch
from lezo_ds.tools.benchmark.shapes import Workload, opt_config, plain_model
from lezo_ds.tools.benchmark.variants import (
    LEARNING_RATE,
    PERTURBATION_SCALE,
    RUN_SEED,
    VariantName,
    mezo_reference,
)
from ranks import run_ranks

from lezo_ds import distributed
from lezo_ds.errors import UserError
from lezo_ds.model.blocks import draw_dropped_layers, find_blocks
from lezo_ds.tools.benchmark.stages import StageClock
from lezo_ds.zo.keys import step_key

CPU = torch.device("cpu")
NUM_BLOCKS = 4
WORKLOAD = Workload(4, 8)


@torch.no_grad()
def independent_step(model, num_dropped):
    """Return (g, weights after the step), from all z kept in memory: MeZO's formulas, no restoring."""
    dropped = draw_dropped_layers(RUN_SEED, 0, NUM_BLOCKS, num_dropped)
    layout = find_blocks(model)
    theta = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(step_key(RUN_SEED, 0))
    z = {
        name: torch.normal(0.0, 1.0, values.shape, generator=generator, dtype=values.dtype)
        for name, values in theta.items()
        if layout.block_of(name) not in dropped
    }
    batch = WORKLOAD.published_batch(0, 1)

    def loss(scale):
        moved = {name: values + scale * z.get(name, 0) for name, values in theta.items()}
        logits = torch.func.functional_call(model, moved, kwargs=dict(batch.inputs)).logits
        wanted = logits[batch.selection.rows, batch.selection.positions]
        return WORKLOAD.loss(wanted, batch).sum() / batch.weight

    g = (loss(PERTURBATION_SCALE) - loss(-PERTURBATION_SCALE)) / (2 * PERTURBATION_SCALE)
    return float(g), {name: values - LEARNING_RATE * g * z.get(name, 0) for name, values in theta.items()}


def _reference_step(text):
    distributed.init_distributed()
    name = VariantName.parse(text)
    model = plain_model(opt_config("opt-tiny", NUM_BLOCKS), "fp32", CPU).double()
    before = copy.deepcopy(model)
    expected = independent_step(before, round(name.sparsity * NUM_BLOCKS))
    gradient = mezo_reference(name, model, WORKLOAD, StageClock(CPU)).step()
    return before.state_dict(), expected, (gradient, dict(model.named_parameters()))


@pytest.mark.distributed
@pytest.mark.parametrize("text", ["mezo_reference", "mezo_reference:0.75", "mezo_fused", "mezo_fused:0.75"])
def test_the_reference_does_the_step_of_mezo_and_with_dropped_blocks_of_lezo(text):
    ((before, (expected_gradient, expected), (gradient, found)),) = run_ranks(_reference_step, 1, text)
    assert gradient == pytest.approx(expected_gradient, rel=1e-6)
    num_moved = 0
    for name, values in found.items():
        # The update is small: it is compared with itself, not with the weight it changes.
        torch.testing.assert_close(
            values - before[name], expected[name] - before[name], rtol=1e-4, atol=1e-15
        )
        num_moved += not torch.equal(values, before[name])
    assert (num_moved == len(found)) == (":" not in text)


def _gradient():
    distributed.init_distributed()
    model = plain_model(opt_config("opt-tiny", NUM_BLOCKS), "fp32", CPU).double()
    return mezo_reference(VariantName.parse("mezo_reference"), model, WORKLOAD, StageClock(CPU)).step()


@pytest.mark.distributed
def test_the_reference_shares_a_batch_among_ranks():
    (alone,) = run_ranks(_gradient, 1)
    both = run_ranks(_gradient, 2)
    assert both == pytest.approx([alone, alone], rel=1e-4)  # the losses are float32


def test_a_name_holds_sparsity_forward_and_directions():
    assert VariantName.parse("ours:0.5:two_pass:3") == VariantName("ours:0.5:two_pass:3", "ours", 0.5, 1, 3)
    assert VariantName.parse("mezo_reference") == VariantName("mezo_reference", "mezo_reference")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mine",
        "ours:1.5",
        "ours:nan",
        "ours:0:sideways",
        "ours:0:dual:0",
        "ours:0:dual:1:1",
        "naive_zero3:0:dual",
    ],
)
def test_a_name_of_no_variant_is_refused(text):
    with pytest.raises(UserError, match="no such variant"):
        VariantName.parse(text)
