"""Parameters in the host's memory or on disk: the same run, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from assets import REPOSITORY
from deepspeed.ops.op_builder import AsyncIOBuilder
from ranks import run_ranks
from tiny_runs import VOCABULARY, full_weights, start_engine, train, write_model
from transformers import OPTConfig

pytestmark = pytest.mark.distributed

NUM_STEPS = 4
COMPILING_SECONDS = 600.0  # DeepSpeed's async_io, at its first use on a machine
ON_DISK_PER_RANK = 4 * 2 + 1  # both feed-forward matrices of each block, and the positions


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """An OPT with shards of 1 MiB and more, the least that DeepSpeed puts on a disk."""
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        word_embed_proj_dim=512,
        ffn_dim=2048,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2046,  # OPT adds two
    )
    return write_model(config, tmp_path_factory.mktemp("wide"), torch.bfloat16)


@pytest.fixture(scope="module")
def expected(wide_model):
    """The same steps without offloading."""
    return run_ranks(_train, 1, wide_model, 1, None)[0]


def _train(directory, num_ranks, zero):
    engine = start_engine(directory, "bf16", num_ranks, {"zero_optimization": zero} if zero else {})
    records = train(engine, NUM_STEPS, num_micro_batches=2)
    return records, engine.weights.digest(), full_weights(engine)


def shipped(name, **offload_changes):
    """Return the zero_optimization section of a shipped JSON with buffers fit for a small machine."""
    zero = json.loads((REPOSITORY / "ds_configs" / f"{name}.json").read_text())["zero_optimization"]
    zero["offload_param"] |= {"pin_memory": False, **offload_changes}
    return zero


def assert_equal_runs(found, expected):
    for records, digest, weights in found:
        assert records == expected[0]
        assert digest == expected[1]
        assert weights.keys() == expected[2].keys()
        assert all(torch.equal(weights[name], expected[2][name]) for name in weights)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_with_its_shards_in_host_memory_equals_one_without(wide_model, expected, num_ranks):
    found = run_ranks(_train, num_ranks, wide_model, num_ranks, shipped("zero3_cpu_offload"))
    assert_equal_runs(found, expected)


@pytest.mark.timeout(COMPILING_SECONDS + 300)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_with_its_shards_on_disk_equals_one_without(wide_model, expected, num_ranks, tmp_path):
    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("DeepSpeed's async_io needs libaio: apt-get install libaio-dev")
    zero = shipped(
        "zero3_nvme_offload", nvme_path=str(tmp_path), max_in_cpu=0, buffer_size=1 << 21, buffer_count=24
    )
    found = run_ranks(_train, num_ranks, wide_model, num_ranks, zero, timeout=COMPILING_SECONDS)
    assert len(list(tmp_path.rglob("*.swp"))) == num_ranks * ON_DISK_PER_RANK
    assert_equal_runs(found, expected)
