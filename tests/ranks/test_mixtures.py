"""Mixtures of experts: ranks whose tokens choose other experts stay in step, and give the same run."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import run_ranks
from safetensors import safe_open
from tiny_adapters import start_engine, train
from tiny_models import FAMILIES, MIXTURES
from tiny_runs import full_weights, write_model
from transformers import AutoModelForCausalLM

from lezo_ds import distributed
from lezo_ds.model.snapshots import snapshot_path

pytestmark = pytest.mark.distributed

NUM_STEPS = 4
PASSES_PER_RANK = 2  # of two micro-batches of a step, each at two probes
NUM_EXPERTS = 64  # so many that the tokens of a pass cannot choose all of them


@pytest.fixture(scope="module", params=MIXTURES)
def directory(request, tmp_path_factory):
    config = copy.deepcopy(FAMILIES[request.param][0])
    config.num_local_experts = config.num_experts = NUM_EXPERTS
    config.num_experts_per_tok = 1
    return write_model(config, tmp_path_factory.mktemp(request.param))


def _train(directory, root, dtype, num_ranks):
    """Return records, digest, digest of a replay, weights, and the experts that each of its passes chose."""
    engine = start_engine(directory, None, dtype, num_ranks, probes_per_pass=1)
    chosen = []
    router = engine.module.model.layers[0].mlp.gate
    router.register_forward_hook(lambda _, __, outputs: chosen.append(set(outputs[2].flatten().tolist())))
    records = train(engine, NUM_STEPS)
    engine.save_checkpoint(root / str(num_ranks))
    digest, weights = engine.weights.digest(), full_weights(engine)
    engine.load_checkpoint(root / "none", records, 1)
    engine.load_checkpoint(root / "none", records)
    return records, digest, engine.weights.digest(), weights, chosen


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_mixture_of_experts_trains_alike_on_one_and_two_ranks(directory, dtype, tmp_path):
    (alone,) = run_ranks(_train, 1, directory, tmp_path, dtype, 1)
    first, second = run_ranks(_train, 2, directory, tmp_path, dtype, 2)
    # If a rank ran only the chosen experts, as modules of their own, ranks would gather other weights.
    assert len(first[4]) == len(second[4]) == NUM_STEPS * PASSES_PER_RANK
    assert any(mine != others for mine, others in zip(first[4], second[4], strict=True))
    for records, digest, replayed, weights, _ in (first, second):
        assert records == alone[0]
        assert digest == replayed == alone[1]
        assert all(torch.equal(weights[name], alone[3][name]) for name in alone[3])
    assert all(record.applied for record in alone[0])
    assert any(record.projected_grads != (0.0,) for record in alone[0])


def _weights(directory):
    return full_weights(start_engine(directory, None, num_ranks=distributed.world_size()))


def test_experts_are_read_from_a_tensor_each_and_written_as_transformers_loads_them(directory, tmp_path):
    with safe_open(directory / "model.safetensors", "pt") as stored:
        assert sum(".experts.63." in name for name in stored.keys()) == 3 * 3  # noqa: SIM118
    expected = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    for weights in run_ranks(_weights, 2, directory):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    (trained,) = run_ranks(_train, 1, directory, tmp_path, "fp32", 1)
    written = AutoModelForCausalLM.from_pretrained(snapshot_path(tmp_path / "1", NUM_STEPS))
    assert all(torch.equal(trained[3][name], p) for name, p in written.named_parameters())
