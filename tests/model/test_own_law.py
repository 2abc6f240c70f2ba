"""A third law of z needs one file of the user's, and no line of the package."""

from __future__ import annotations

import pytest
import torch
from eager_noise import draw
from ranks import run_ranks
from tiny_runs import NUM_BLOCKS, full_weights, make_batch, start_engine, train
from transformers import AutoModelForCausalLM

from lezo_ds.data.objectives import classification_loss
from lezo_ds.zo.keys import step_key
from lezo_ds.zo.laws import FIRST_OF_COLUMNS

pytestmark = pytest.mark.distributed
LAW = {"law": "own_law:EqualRows", "noise_rank": 1, "sparsity": 0.0}


def train_by_own_law(directory, num_ranks):
    engine = start_engine(directory, num_ranks=num_ranks, **LAW)
    ids = {shard.name: shard.elements.parameter_id for shard in engine.weights.shards}
    records = train(engine, 3)
    return [record.projected_grads[0] for record in records], full_weights(engine), ids


@torch.no_grad()
def slope_by_hand(directory, key, ids, scale):
    """Return the slope along z of the loss, by models whose weights hold theta +- mu z."""
    losses = []
    for signed in (scale, -scale):
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
        for name, weight in model.named_parameters():
            if "layers." in name and weight.dim() == 2:
                num_columns = weight.shape[1]
                weight += signed * draw("normal", key, ids[name], FIRST_OF_COLUMNS, num_columns)
        total = 0.0
        for micro_batch in make_batch(0):
            logits = model(**micro_batch.inputs).logits
            selection = micro_batch.selection
            chosen = logits[selection.rows, selection.positions]
            if selection.vocabulary is not None:
                chosen = chosen[:, selection.vocabulary]
            total += float(classification_loss(chosen, micro_batch).sum())
        losses.append(total / sum(micro_batch.weight for micro_batch in make_batch(0)))
    return (losses[0] - losses[1]) / (2 * scale)


def test_a_law_of_ones_own_trains_on_any_number_of_ranks(opt_directory):
    ((slopes, weights, ids),) = run_ranks(train_by_own_law, 1, opt_directory, 1)
    seed = 11
    by_hand = slope_by_hand(opt_directory, step_key(seed, 0), ids, scale=1e-3)
    assert slopes[0] == pytest.approx(by_hand, rel=1e-3)
    base = AutoModelForCausalLM.from_pretrained(opt_directory).state_dict()
    num_matrices = 0
    for name, trained in weights.items():
        change = trained - base[name]
        if "layers." in name and change.dim() == 2:
            num_matrices += 1
            assert change.abs().max() > 0
            assert torch.allclose(change, change[:1].expand_as(change), atol=1e-6)
        else:
            assert not change.any()
    assert num_matrices == 6 * NUM_BLOCKS
    for others in run_ranks(train_by_own_law, 2, opt_directory, 2):
        assert others[0] == slopes
        assert all(torch.equal(weights[name], others[1][name]) for name in weights)
