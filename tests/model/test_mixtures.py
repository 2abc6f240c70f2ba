"""Mixtures of experts: the ranks choose experts of their own, and the weights are the same."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import run_ranks
from thorough import thorough
from tiny_adapters import start_engine, train
from tiny_models import FAMILIES, MIXTURES
from tiny_runs import full_weights, write_model
from transformers import AutoModelForCausalLM

from lezo_ds.checkpoints.snapshots import snapshot_path

pytestmark = pytest.mark.distributed


def _train_mixture(directory, root, num_ranks):
    engine = start_engine(directory, None, "bf16", num_ranks, probes_per_pass=1)
    chosen = []
    router = engine.module.model.layers[0].mlp.gate
    router.register_forward_hook(lambda _, __, outputs: chosen.append(outputs[2].unique().tolist()))
    records = train(engine, 4)
    engine.save_checkpoint(root / str(num_ranks))
    return records, engine.weights.digest(), full_weights(engine), chosen


@pytest.mark.parametrize("family", [MIXTURES[0], *map(thorough, MIXTURES[1:])])
def test_a_mixture_of_experts_trains_alike_on_one_and_two_ranks_and_is_stored_as_published(
    family, tmp_path
):
    config = copy.deepcopy(FAMILIES[family][0])
    # The tokens of a pass cannot choose all of them.
    config.num_local_experts = config.num_experts = 64
    config.num_experts_per_tok = 1
    directory = write_model(config, tmp_path / "model", torch.bfloat16)
    (alone,) = run_ranks(_train_mixture, 1, directory, tmp_path, 1)
    first, second = run_ranks(_train_mixture, 2, directory, tmp_path, 2)
    assert len(first[3]) == len(second[3]) > 0
    assert any(mine != others for mine, others in zip(first[3], second[3], strict=True))
    for records, digest, _, _ in (first, second):
        assert (records, digest) == alone[:2]
    assert any(record.applied and record.projected_grads != (0.0,) for record in alone[0])
    snapshot = snapshot_path(tmp_path / "2", 4)
    written = AutoModelForCausalLM.from_pretrained(snapshot, dtype=torch.bfloat16)
    assert all(torch.equal(alone[2][name], p) for name, p in written.named_parameters())
