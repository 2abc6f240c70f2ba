"""Fast noise and the choice of tiles, on a GPU or in Triton's interpreter (see test_noise_triton.py)."""

from __future__ import annotations

import math
import os

import pytest
import torch
from tiny_runs import start_engine, train

from lezo_ds.engine import agreement, lezo_engine
from lezo_ds.noise import split_master
from lezo_ds.noise.eager import EagerNoise
from lezo_ds.sharding import weights as model_weights
from lezo_ds.sharding import witness

pytest.importorskip("triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("no GPU; test_noise_triton.py runs it in the interpreter", allow_module_level=True)

from lezo_ds.noise import gpu
from lezo_ds.noise.gpu import TILES, Tile, TritonNoise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAST = TritonNoise("fast", Tile(1024, 8))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PRECISIONS = ["stochastic", "fp32_master", "nearest"]
MILLION = 1_000_000


@pytest.fixture(scope="module")
def million():
    """A million normals; in large tiles, which suit the interpreter."""
    return TritonNoise("fast", Tile(1 << 14, 8)).normal(2024, 5, 0, MILLION, DEVICE).cpu()


def weights(count, dtype=torch.float32):
    return torch.randn(count, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


def test_fast_noise_is_as_close_to_exact_noise_as_documented(million):
    exact = EagerNoise().normal(2024, 5, 0, MILLION, torch.device("cpu"))
    difference = (million.double() - exact.double()).abs().view(-1, 2).amax(1)
    radius = exact.double().view(-1, 2).norm(dim=1)
    assert (difference <= torch.clamp(2e-7 / radius, 5e-6, 6e-4)).all()
    assert radius.min() < 0.01
    assert difference.max() > 0  # it is another computation
    if DEVICE.type == "cpu":
        assert difference.max() < 4e-6  # of the formula: the interpreter's functions are not approximate


def test_the_moments_are_those_of_a_standard_normal(million):
    z, standard_error = million.double(), 1e-3  # of the mean of a million draws
    assert abs(z.mean()) < 4 * standard_error
    assert abs(z.var() - 1) < 4 * math.sqrt(2) * standard_error
    assert abs((z**3).mean()) < 4 * math.sqrt(15) * standard_error
    assert abs((z**4).mean() - 3) < 4 * math.sqrt(96) * standard_error
    assert z.abs().max() < 5.78


def test_a_million_draws_pass_kolmogorov_and_smirnov(million):
    ordered = million.double().sort().values
    theory = torch.special.ndtr(ordered)
    above = (torch.arange(1, MILLION + 1) / MILLION - theory).max()
    below = (theory - torch.arange(MILLION) / MILLION).max()
    assert max(above, below) * math.sqrt(MILLION) < 1.63  # the 1 % critical value


@pytest.mark.parametrize(("start", "count"), [(0, 1), (1, 1), (3, 2), (1021, 1030), (4096, 5000)])
def test_any_slice_holds_the_values_of_the_whole(million, start, count):
    part = FAST.normal(2024, 5, start, count, DEVICE).cpu()
    assert torch.equal(part, million[start : start + count])


def test_perturbation_and_update_see_the_same_noise():
    z = FAST.normal(7, 3, 0, 5003, DEVICE)
    zeros = torch.zeros(5003, device=DEVICE)
    plus, minus = FAST.perturb_pair(zeros, 7, 3, 1.0)
    assert torch.equal(plus, z)
    assert torch.equal(minus, -z)
    part = torch.zeros(1000, device=DEVICE)
    FAST.update_(part, 1001, 7, 3, -1.0, "nearest")
    assert torch.equal(part, z[1001:2001])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 13, 1030])
def test_perturbed_pairs_and_rows_are_the_single_perturbations(dtype, width):
    theta = weights(11 * width, dtype).view(11, width)
    rows = torch.tensor([3, 0, 10, 3], device=DEVICE)
    whole = FAST.perturb(theta, 5, 6, 1e-3), FAST.perturb(theta, 5, 6, -1e-3)
    pair, pair_of_rows = FAST.perturb_pair(theta, 5, 6, 1e-3), FAST.perturb_rows_pair(theta, rows, 5, 6, 1e-3)
    for expected, perturbed, perturbed_rows in zip(whole, pair, pair_of_rows, strict=True):
        assert torch.equal(perturbed, expected)
        assert torch.equal(perturbed_rows, expected[rows])


def stored(dtype, precision, count=1101):
    if precision == "fp32_master":
        return split_master(weights(count), dtype)
    return weights(count, dtype), None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_updates_at_once_and_in_slices_are_the_updates_one_by_one(dtype, precision):
    steps = [(2**64 - 1, 1e-2), (0, -3e-4)]
    (one_by_one, low), (at_once, other_low) = stored(dtype, precision), stored(dtype, precision)
    for seed, coefficient in steps:
        for first, last in ((0, 366), (366, 1101)):
            part_low = None if low is None else low[first:last]
            FAST.update_(one_by_one[first:last], 7 + first, seed, 6, coefficient, precision, part_low)
    FAST.update_many_(at_once, 7, 6, steps, precision, other_low)
    assert torch.equal(at_once, one_by_one)
    assert low is None or torch.equal(low, other_low)
    assert not torch.equal(at_once, stored(dtype, precision)[0])


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_no_tile_changes_a_bit(mode):
    theta, found = weights(5003, torch.bfloat16), []
    for tile in TILES:
        noise, shard = TritonNoise(mode, tile), theta.clone()
        noise.update_(shard, 3, 5, 6, -0.7, "stochastic")
        found.append((noise.normal(5, 6, 9, 5003, DEVICE), *noise.perturb_pair(theta, 5, 6, 0.1), shard))
    for others in found[1:]:
        assert all(torch.equal(other, first) for other, first in zip(others, found[0], strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tuning_leaves_the_weights_alone(precision, monkeypatch):
    monkeypatch.setattr(gpu, "is_timed", lambda device: True)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(gpu, "TRIAL_ELEMENTS", 256)
        monkeypatch.setattr(gpu, "TUNED_ELEMENTS", 5003)
        monkeypatch.setattr(gpu, "_TRIALS", 2)
    dtype, count = torch.bfloat16, gpu.TUNED_ELEMENTS
    (shard, low), (expected, expected_low) = stored(dtype, precision, count), stored(dtype, precision, count)
    tuned, plain = TritonNoise(), TritonNoise(tile=TILES[0])
    for noise, values, low_bits in ((tuned, shard, low), (plain, expected, expected_low)):
        noise.update_(values, 0, 5, 6, 0.01, precision, low_bits)
        noise.update_(values, 0, 6, 6, 0.01, precision, low_bits)
    assert torch.equal(shard, expected)
    assert low is None or torch.equal(low, expected_low)
    assert torch.equal(tuned.perturb(shard, 5, 6, 0.01), plain.perturb(shard, 5, 6, 0.01))
    assert len(tuned._fastest) == 2
    assert set(tuned._fastest.values()) <= set(TILES)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the tests' engines run on the CPU")
def test_a_run_with_fast_noise_is_watched_and_replayed_bit_for_bit(opt_directory, tmp_path, monkeypatch):
    # The interpreter's kernels work on a CPU, where there is no fast noise otherwise.
    for module in (agreement, lezo_engine, model_weights, witness):
        monkeypatch.setattr(module, "noise_backend", lambda device, mode: TritonNoise(mode))
    engine = start_engine(opt_directory, noise="fast")
    engine.watch_weights()
    records = train(engine, 1, num_micro_batches=1)
    engine.check_weights()
    digest = engine.weights.digest()
    engine.load_checkpoint(tmp_path, records, 0)
    assert engine.weights.digest() != digest
    engine.load_checkpoint(tmp_path, records)
    assert engine.weights.digest() == digest
    monkeypatch.undo()
    exact = start_engine(opt_directory)
    exact_records = train(exact, 1, num_micro_batches=1)
    assert exact.weights.digest() != digest
    for record, expected in zip(records, exact_records, strict=True):
        assert record.projected_grads == pytest.approx(expected.projected_grads, rel=1e-2)
