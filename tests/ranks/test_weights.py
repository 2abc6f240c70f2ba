from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_runs import DS_CONFIG, NUM_BLOCKS, start_engine, train, write_model
from transformers import OPTConfig

from lezo_ds import distributed
from lezo_ds.errors import UserError
from lezo_ds.forward.blocks import find_blocks
from lezo_ds.model.sharded_model import load_weights
from lezo_ds.noise import noise_backend
from lezo_ds.noise.reference import join_master
from lezo_ds.sharding import zero3
from lezo_ds.sharding.checkpoint_files import DTYPES, build_on_meta, load_model_config
from lezo_ds.sharding.parameters import NamedParameter, parameter_ids
from lezo_ds.sharding.weights import ShardedWeights
from lezo_ds.zo.records import StepRecord
from lezo_ds.zo.updates import step_updates

pytestmark = pytest.mark.distributed

PRECISIONS = ("fp32_master", "stochastic", "nearest")


def make_records(num_steps, seed=5):
    """Return steps with made-up gradients, some skipped, some at learning rate 0."""
    generator = torch.Generator().manual_seed(seed)
    records = []
    for step in range(num_steps):
        gradient = float(torch.randn((), generator=generator, dtype=torch.float64))
        dropped = tuple(sorted(torch.randperm(NUM_BLOCKS, generator=generator)[:2].tolist()))
        applied = step % 7 != 3
        records.append(
            StepRecord(
                step=step,
                key=1000 + step,
                dropped_layers=dropped,
                projected_grads=(gradient,) if applied else (),
                learning_rate=0.0 if step % 11 == 5 else 1e-3,
                perturbation_scale=1e-3,
                loss=0.5 if applied else None,
                applied=applied,
            )
        )
    return records


def shard(directory, dtype, precision, frozen=()):
    """Return a model's shards and the model, without DeepSpeed's engine, which refuses fp16 on some CPUs."""
    torch.set_num_threads(1)
    distributed.init_distributed()
    model = build_on_meta(load_model_config(Path(directory)), DTYPES[dtype])
    layout = find_blocks(model)
    aliases = {name: (name,) for name, _ in model.named_parameters()}
    ids = parameter_ids(aliases)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    zero3.shard_model(model, json.loads(DS_CONFIG.read_text()) | {"train_micro_batch_size_per_gpu": 1})
    named = {
        parameter: NamedParameter(name, ids[name], layout.block_of(name))
        for name, parameter in model.named_parameters()
    }
    parameters = zero3.sharded_parameters(model, named)
    weights = ShardedWeights(parameters, aliases=aliases, precision=precision)
    load_weights(weights, model, Path(directory))
    return weights, model


def gather(weights):
    """Return the full values in float32 as stored, by name. A collective."""
    return {p.name: join_master(p.gather(), weights.gather_low_bits(p)) for p in weights.parameters}


# Loading.


def _load(directory, dtype, precision):
    weights, _ = shard(directory, dtype, precision)
    return gather(weights), weights.digest(), {p.name: p.count for p in weights.parameters}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_together_hold_the_checkpoint_and_each_only_its_slice(opt_directory, num_ranks):
    stored = load_file(opt_directory / "model.safetensors")
    results = run_ranks(_load, num_ranks, opt_directory, "fp32", "stochastic")
    for values, digest, _ in results:
        assert digest == results[0][1]
        assert values.keys() == stored.keys()
        assert all(torch.equal(values[name], stored[name]) for name in stored)
    for name, tensor in stored.items():
        assert sum(counts[name] for *_, counts in results) == tensor.numel()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_16_bits_cannot_hold_of_the_checkpoint_becomes_low_bits(
    opt_directory, opt_fp16_directory, dtype
):
    stored = load_file(opt_directory / "model.safetensors")
    ((exact, *_),) = run_ranks(_load, 1, opt_directory, dtype, "fp32_master")
    ((rounded, *_),) = run_ranks(_load, 1, opt_directory, dtype, "nearest")
    ((narrow, *_),) = run_ranks(_load, 1, opt_fp16_directory, dtype, "fp32_master")
    for name, tensor in stored.items():
        if dtype == "bf16":
            assert torch.equal(exact[name], tensor)
        else:
            torch.testing.assert_close(exact[name], tensor, rtol=0, atol=2.0**-40)
        assert torch.equal(rounded[name], tensor.to(DTYPES[dtype]).float())
        assert torch.equal(narrow[name], tensor.half().float())


def _load_or_error(directory):
    try:
        shard(directory, "fp32", "nearest")
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.decoder.layers.2.fc1.bias"), "lacks 1 of the model's 68"),
        (
            lambda tensors: tensors.update({"model.decoder.layers.2.fc1.bias": torch.zeros(64)}),
            "fc1.bias of the checkpoint does not fit the model; got: (64,); expected: (65,)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(opt_directory, tmp_path, change, message):
    tensors = load_file(opt_directory / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((opt_directory / "config.json").read_text())
    for error in run_ranks(_load_or_error, 2, tmp_path):
        assert error is not None
        assert message in error


# Updating and replaying.


def _update_one_by_one_and_at_once(directory, dtype):
    found = {}
    for precision in PRECISIONS:
        weights, _ = shard(directory, dtype, precision)
        before = weights.digest()
        records = make_records(200)
        for step in range(len(records)):
            weights.apply(step_updates(records, step, step + 1))
        live = weights.digest()
        weights, _ = shard(directory, dtype, precision)
        weights.apply(step_updates(records, 0, 90))
        weights.apply(step_updates(records, 90, len(records)))
        found[precision] = (before, live, weights.digest())
    return found


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_200_updates_and_their_replay_give_the_same_bits_on_any_number_of_ranks(opt_directory, dtype):
    results = [
        result
        for num_ranks in (1, 2)
        for result in run_ranks(_update_one_by_one_and_at_once, num_ranks, opt_directory, dtype)
    ]
    assert all(result == results[0] for result in results)
    for before, live, replayed in results[0].values():
        assert before != live == replayed
    assert len({live for _, live, _ in results[0].values()}) == (1 if dtype == "fp32" else len(PRECISIONS))


def _update_by_hand(directory, dtype):
    """Return (values before, values after one step, record, z by name), all whole."""
    weights, _ = shard(directory, dtype, "fp32_master")
    before, record = gather(weights), make_records(1)[0]
    weights.apply(step_updates([record], 0, 1))
    noise = noise_backend(torch.device("cpu"))
    z = {
        p.name: noise.draw(record.key, p.named.parameter_id, 0, p.numel, torch.device("cpu")).view(p.shape)
        for p in weights.parameters
    }
    return before, gather(weights), record, z


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_an_update_is_minus_learning_rate_times_gradient_times_noise(opt_directory, dtype):
    before, after, record, z = run_ranks(_update_by_hand, 2, opt_directory, dtype)[0]
    dropped = tuple(f"model.decoder.layers.{block}." for block in record.dropped_layers)
    assert len(dropped) == 2
    for name, value in before.items():
        expected = value - record.learning_rate * record.projected_grads[0] * z[name]
        if name.startswith(dropped):
            assert torch.equal(after[name], value)
        elif dtype == "fp16":
            torch.testing.assert_close(after[name], expected, rtol=0, atol=2.0**-40)
        else:
            assert torch.equal(after[name], expected)


# The digest.


def _flip_one_bit(directory):
    weights, _ = shard(directory, "bf16", "fp32_master")
    parameter = weights.parameters[5]
    digests = [weights.digests()]
    for bits in (parameter.parameter.ds_tensor.view(torch.int16), weights.low_bits[parameter.name]):
        if distributed.rank() == 1:
            bits[parameter.count - 1] ^= 1
        digests.append(weights.digests())
    return parameter.name, digests


def test_one_flipped_bit_of_a_shard_or_its_low_bits_changes_the_digest_of_that_parameter_alone(opt_directory):
    for name, (clean, high, low) in run_ranks(_flip_one_bit, 2, opt_directory):
        assert len({clean[name], high[name], low[name]}) == 3
        assert all(clean[other] == high[other] == low[other] for other in clean if other != name)


# Padding: what lies past the last element of the last shard is uninitialised memory.


def _train_with_padding(directory, num_ranks, poison, root):
    engine = start_engine(directory, "bf16", num_ranks)
    paddings = [p.parameter.ds_tensor.data[p.count :] for p in engine.weights.parameters]
    if poison:
        for padding in paddings:
            padding.fill_(float("nan"))
    base, records = engine.weights.digest(), train(engine, 4)
    path = engine.save_checkpoint(root)
    poisoned = sum(int(padding.isnan().sum()) for padding in paddings)
    engine.load_checkpoint(root, records, 0)
    engine.load_checkpoint(root, records, 4)
    return base, records, engine.weights.digest(), str(path), poisoned, sum(p.numel() for p in paddings)


def test_nan_in_the_padding_reaches_nothing_and_stays_where_it_is(opt_directory, tmp_path):
    clean = run_ranks(_train_with_padding, 4, opt_directory, 4, False, tmp_path / "clean")
    dirty = run_ranks(_train_with_padding, 4, opt_directory, 4, True, tmp_path / "dirty")
    assert [result[:3] for result in clean] == [result[:3] for result in dirty]
    assert all(record.applied for record in dirty[0][1])
    assert dirty[-1][4] == dirty[-1][5] > 60
    for folder in ("", "low_bits"):
        (left,), (right,) = (sorted(Path(r[0][3], folder).glob("*.safetensors")) for r in (clean, dirty))
        assert left.read_bytes() == right.read_bytes()


# Host memory while loading.

LARGE = OPTConfig(
    vocab_size=2000,
    hidden_size=768,
    word_embed_proj_dim=768,
    num_attention_heads=12,
    ffn_dim=3072,
    num_hidden_layers=12,
    max_position_embeddings=64,
)


def _peak_memory_of_loading(small, large):
    """Return bytes: peak of this process's memory above that before, the model, its largest parameter."""
    num_ranks = int(os.environ["WORLD_SIZE"])
    # What the libraries take on first use is not the model's.
    train(start_engine(small, num_ranks=num_ranks), 2, num_ranks)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    weights = start_engine(large, num_ranks=num_ranks).weights
    peak = _memory("VmHWM") - before
    sizes = [parameter.numel * 4 for parameter in weights.parameters]
    return peak, sum(sizes), max(sizes)


def _memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux only")
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_no_rank_holds_more_than_its_share_while_loading(opt_directory, tmp_path, num_ranks):
    large = write_model(LARGE, tmp_path)
    results = run_ranks(_peak_memory_of_loading, num_ranks, opt_directory, large)
    for rank, (peak, model, largest) in enumerate(results):
        share = model / num_ranks
        assert share < peak < 1.2 * share + 2 * largest, rank
