"""A third law of z needs one file of the user's, and no line of the package."""

import pytest
import torch
from family_checks import Family
from ranks import run_ranks
from tiny_runs import NUM_BLOCKS, full_weights, start_engine, train
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.distributed
LAW = {"law": "own_law:EqualRows", "noise_rank": 1, "sparsity": 0.0}


def train_by_own_law(directory, num_ranks):
    engine = start_engine(directory, num_ranks=num_ranks, **LAW)
    records = train(engine, 3)
    return [record.projected_grads[0] for record in records], full_weights(engine)


def test_a_law_of_ones_own_has_the_slopes_of_plain_models(tmp_path):
    Family("opt", tmp_path).step(**LAW)


def test_a_law_of_ones_own_trains_on_any_number_of_ranks(opt_directory):
    ((slopes, weights),) = run_ranks(train_by_own_law, 1, opt_directory, 1)
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
