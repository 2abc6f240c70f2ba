"""One suite that every backend passes: it gives the bits of the eager reference.

The Triton backend needs a CUDA device or Triton's interpreter (TRITON_INTERPRET=1, see test_noise_triton.py),
which is slow: hence the small tensors.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import get_args

import pytest
import torch

from lezo_ds.noise import (
    Distribution,
    Shard,
    Update,
    Whole,
    eager,
    noise_backend,
    split_master,
    stacked,
)
from lezo_ds.noise.cpu import CpuNoise
from lezo_ds.noise.draws import dither_words, draw
from lezo_ds.noise.eager import EagerNoise

CPU = torch.device("cpu")
REFERENCE = EagerNoise()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PRECISIONS = ["stochastic", "fp32_master", "nearest"]
GOLDEN = json.loads((Path(__file__).parent / "golden" / "noise.json").read_text())
TRITON = ["triton"] if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" else []
KEY, PARAMETER = 5, 6

every_distribution = pytest.mark.parametrize("distribution", get_args(Distribution))


@pytest.fixture(params=["eager", "cpu", *TRITON])
def backend_and_device(request):
    if request.param == "triton":
        from lezo_ds.noise.gpu import TritonNoise

        return TritonNoise(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return (EagerNoise() if request.param == "eager" else CpuNoise()), CPU


def bits(tensor):
    """The bit patterns, with one pattern for all NaN: the backends may differ in the payload of a NaN."""
    if tensor.dtype == torch.int16:
        return tensor.cpu()
    patterns = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    return patterns.where(~tensor.isnan(), -1).cpu()


def assert_same_bits(actual, expected):
    if actual is None or expected is None:
        assert actual is expected
        return
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    different = int((bits(actual) != bits(expected)).sum())
    assert different == 0, f"{different} of {actual.numel()} elements differ"


def values_of_every_size(count):
    """fp32 values from far below fp16's smallest to its overflow, zeros of both signs, infinities and NaN."""
    generator = torch.Generator().manual_seed(1)
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 65519.9, 65520.0, 3.3e38, 1e-40]
    exponents = torch.randint(-30, 18, (count - len(special),), generator=generator)
    ordinary = torch.randn(count - len(special), generator=generator) * 2.0**exponents
    return torch.cat([ordinary, torch.tensor(special)])


def stored(dtype, precision, device=CPU, count=1101):
    """A shard and its low bits."""
    values = values_of_every_size(count)
    shard, low = split_master(values, dtype) if precision == "fp32_master" else (values.to(dtype), None)
    return shard.to(device), None if low is None else low.to(device)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["what"])
def test_the_noise_has_its_golden_bits(backend_and_device, case):
    noise, device = backend_and_device
    count = len(case["normal"])
    z = noise.draw(case["seed"], case["parameter_id"], case["start"], count, device)
    patterns = z.cpu().view(torch.int32)
    assert [f"{int(pattern) & 0xFFFFFFFF:08x}" for pattern in patterns] == case["normal"]
    count = len(case["rademacher"])
    signs = noise.draw(case["seed"], case["parameter_id"], case["start"], count, device, "rademacher")
    assert "".join("+" if sign == 1 else "-" for sign in signs.tolist()) == case["rademacher"]
    assert set(signs.tolist()) == {1.0, -1.0}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["what"])
def test_the_dither_has_its_golden_bits(case):
    where = (case["seed"], case["parameter_id"], case["start"], len(case["dither"]), CPU)
    assert [f"{int(word):08x}" for word in dither_words(*where)] == case["dither"]


@every_distribution
@pytest.mark.parametrize(
    ("start", "count"), [(0, 0), (1, 1), (3, 2), (0, 1024), (1021, 1030), (5, 2055), (127, 9000)]
)
def test_a_draw_is_the_reference(backend_and_device, start, count, distribution):
    noise, device = backend_and_device
    key, parameter_id = 2**63 + 12345, 77
    z = noise.draw(key, parameter_id, start, count, device, distribution)
    assert_same_bits(z, REFERENCE.draw(key, parameter_id, start, count, CPU, distribution))


@every_distribution
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_each_perturbation_is_the_plain_formula_in_fp32(backend_and_device, dtype, out_dtype, distribution):
    noise, device = backend_and_device
    theta = values_of_every_size(1071).to(dtype).view(7, 9, 17)
    z = draw(distribution, KEY, PARAMETER, 0, theta.numel(), CPU).view_as(theta)
    for scales in ([1e-3, -1e-3], [-0.01], [0.25, 1e-3, 0.0, -0.25]):
        perturbed = noise.perturb(theta.to(device), KEY, PARAMETER, scales, out_dtype, distribution)
        for scale, actual in zip(scales, perturbed, strict=True):
            # The sum would turn -0.0 + 0.0 into 0.0.
            expected = theta if scale == 0 else theta.float() + z * scale
            assert_same_bits(actual, expected.to(out_dtype))


@every_distribution
@pytest.mark.parametrize("scales", [[1e-3, -1e-3], [0.25], [0.0, 0.1]])
def test_parameters_perturbed_at_once_are_those_perturbed_one_by_one(
    backend_and_device, scales, distribution
):
    noise, device = backend_and_device
    shapes = [(16, 8), (16,), (5, 13), (0, 3), (2048,), (3,), (64, 33)]
    wholes = []
    for parameter_id, shape in enumerate(shapes):
        theta = torch.randn(shape, generator=torch.Generator().manual_seed(parameter_id))
        dtype = DTYPES[parameter_id % 2]
        out_dtype = torch.float32 if theta.dim() == 1 else dtype
        wholes.append(Whole(theta.to(dtype).to(device), parameter_id, out_dtype))
    wholes.append(wholes[0]._replace(out_dtype=torch.float16))
    found = noise.perturb_all(wholes, KEY, scales, distribution)
    for (theta, parameter_id, out_dtype), copies in zip(wholes, found, strict=True):
        expected = REFERENCE.perturb(theta.cpu(), KEY, parameter_id, scales, out_dtype, distribution)
        assert len(copies) == len(scales)
        for actual, wanted in zip(copies, expected, strict=True):
            assert_same_bits(actual, wanted)
        assert_same_bits(stacked(copies), torch.stack(expected))
    assert noise.perturb_all([], KEY, scales, distribution) == []


@every_distribution
@pytest.mark.parametrize("precision", PRECISIONS)
def test_shards_updated_at_once_are_those_updated_one_by_one(backend_and_device, precision, distribution):
    noise, device = backend_and_device
    steps = [Update(KEY, 0.01, 0.999), Update(KEY + 1, -0.3)]
    shards, expected = [], []
    for place, (count, start) in enumerate([(1104, 0), (1101, 0), (1040, 4096), (30, 7), (1056, 2**34 + 2)]):
        dtype = DTYPES[place % 3 if place < 3 else 1]
        values, low = stored(dtype, precision, device, count)
        shards.append(Shard(values, start, place, low))
        expected.append(stored(dtype, precision, CPU, count))
        REFERENCE.update_(expected[-1][0], start, place, steps, precision, expected[-1][1], distribution)
    noise.update_all_(shards, steps, precision, distribution)
    for shard, (values, low) in zip(shards, expected, strict=True):
        assert_same_bits(shard.values, values)
        assert_same_bits(shard.low, low)
    noise.update_all_([], steps, precision, distribution)


@every_distribution
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 13, 1, 128, 1030])
def test_perturbed_rows_are_those_of_the_whole(backend_and_device, dtype, width, distribution):
    noise, device = backend_and_device
    theta = values_of_every_size(11 * width).to(dtype).view(11, width)
    rows = torch.tensor([3, 0, 10, 3, 7])
    for out_dtype, scales in ((None, [1e-3, -1e-3]), (torch.float32, [0.0, 1e-3])):
        perturbed = noise.perturb_rows(
            theta.to(device), rows.to(device), KEY, PARAMETER, scales, out_dtype, distribution
        )
        expected = REFERENCE.perturb(theta, KEY, PARAMETER, scales, out_dtype, distribution)
        for actual, whole in zip(perturbed, expected, strict=True):
            assert_same_bits(actual, whole[rows])


def test_opposite_scales_share_a_draw_and_a_scale_of_zero_draws_nothing(monkeypatch):
    drawn = []

    def record(self, distribution, theta, rows, key, parameter_id, scale, outs):
        drawn.append([scale, -scale][: len(outs)])

    monkeypatch.setattr(EagerNoise, "_perturb", record)
    theta = torch.ones(4)
    assert REFERENCE.perturb(theta, KEY, PARAMETER, [0.0])[0] is theta
    assert len(REFERENCE.perturb(theta, KEY, PARAMETER, [1.0, 2.0, 0.0, -1.0, 2.0, 1.0])) == 6
    assert drawn == [[1.0, -1.0], [2.0], [2.0], [1.0]]


def test_a_transposed_parameter_is_perturbed_by_its_row_major_index(backend_and_device):
    noise, device = backend_and_device
    theta = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    (transposed,) = noise.perturb(theta.t().contiguous().to(device).t(), KEY, PARAMETER, [0.1])
    assert_same_bits(transposed, REFERENCE.perturb(theta, KEY, PARAMETER, [0.1])[0])


def test_empty_inputs_are_accepted(backend_and_device):
    noise, device = backend_and_device
    assert noise.perturb(torch.empty(0, 3, device=device), KEY, PARAMETER, [0.1])[0].shape == (0, 3)
    no_rows = torch.empty(0, dtype=torch.int64, device=device)
    ones = torch.ones(2, 3, device=device)
    assert noise.perturb_rows(ones, no_rows, KEY, PARAMETER, [0.1])[0].shape == (0, 3)
    assert noise.perturb(ones, KEY, PARAMETER, []) == []
    noise.update_(torch.empty(0, device=device), 10, PARAMETER, [Update(KEY, 0.1)], "nearest")
    noise.update_(ones.view(-1), 10, PARAMETER, [], "nearest")
    assert (ones == 1).all()


@every_distribution
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("start", "coefficient", "factor"), [(0, 1e-3, 1.0), (4099, -0.7, 0.999), (2**34 + 2, 3e-7, 1 - 1e-6)]
)
def test_an_update_is_the_reference(
    backend_and_device, dtype, precision, start, coefficient, factor, distribution
):
    noise, device = backend_and_device
    expected, expected_low = stored(dtype, precision)
    actual, actual_low = stored(dtype, precision, device)
    steps = [Update(KEY, coefficient, factor)]
    REFERENCE.update_(expected, start, PARAMETER, steps, precision, expected_low, distribution)
    noise.update_(actual, start, PARAMETER, steps, precision, actual_low, distribution)
    assert_same_bits(actual, expected)
    assert_same_bits(actual_low, expected_low)


@every_distribution
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.99])
def test_an_update_is_the_plain_formula_in_fp32(backend_and_device, dtype, factor, distribution):
    noise, device = backend_and_device
    before, _ = stored(dtype, "nearest")
    shard = before.to(device, copy=True)
    noise.update_(shard, 9, PARAMETER, [Update(KEY, 0.3, factor)], "nearest", distribution=distribution)
    values = before.float() if factor == 1.0 else before.float() * factor
    z = draw(distribution, KEY, PARAMETER, 9, len(before), CPU)
    assert_same_bits(shard, (values - z * 0.3).to(dtype))


@every_distribution
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_updates_at_once_are_the_updates_one_by_one(backend_and_device, dtype, precision, distribution):
    noise, device = backend_and_device
    steps = [Update(2**64 - 1, 1e-2), Update(0, -3e-4, 0.5), Update(12345678901234567890, 0.5, 1.001)]
    one_by_one, one_by_one_low = stored(dtype, precision, device)
    at_once, at_once_low = stored(dtype, precision, device)
    for step in steps:
        noise.update_(one_by_one, 7, PARAMETER, [step], precision, one_by_one_low, distribution)
    noise.update_(at_once, 7, PARAMETER, steps, precision, at_once_low, distribution)
    assert_same_bits(at_once, one_by_one)
    assert_same_bits(at_once_low, one_by_one_low)


@every_distribution
@pytest.mark.parametrize("precision", PRECISIONS)
def test_updates_of_the_slices_are_the_slices_of_the_update(backend_and_device, precision, distribution):
    noise, device = backend_and_device
    steps = [Update(KEY, 0.01, 0.999)]
    whole, whole_low = stored(torch.bfloat16, precision, device)
    parts, parts_low = stored(torch.bfloat16, precision, device)
    noise.update_(whole, 0, PARAMETER, steps, precision, whole_low, distribution)
    for first, last in ((0, 367), (367, 734), (734, 1101)):
        part_low = None if parts_low is None else parts_low[first:last]
        noise.update_(parts[first:last], first, PARAMETER, steps, precision, part_low, distribution)
    assert_same_bits(parts, whole)
    assert_same_bits(parts_low, whole_low)


@every_distribution
def test_the_chunks_of_the_reference_change_no_bit(monkeypatch, distribution):
    theta = torch.randn(37, 29, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = torch.tensor([5, 3, 36, 0, 0, 11])
    found = []
    for chunk in (eager.CHUNK, 64):
        monkeypatch.setattr(eager, "CHUNK", chunk)
        shard = theta.view(-1).clone()
        drawn = {"distribution": distribution}
        REFERENCE.update_(shard, 3, PARAMETER, [Update(KEY, 0.1)], "stochastic", **drawn)
        perturbed = REFERENCE.perturb(theta, KEY, PARAMETER, [0.1, -0.1], **drawn)
        of_rows = REFERENCE.perturb_rows(theta, rows, KEY, PARAMETER, [0.1], **drawn)
        found.append([shard, *perturbed, *of_rows, REFERENCE.draw(KEY, PARAMETER, 3, 200, CPU, **drawn)])
    for actual, expected in zip(*found, strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.skipif(not TRITON, reason="no GPU; test_noise_triton.py runs it in the interpreter")
@every_distribution
def test_the_tile_of_triton_changes_no_bit(monkeypatch, distribution):
    from lezo_ds.noise import gpu

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    tile = gpu.TILES[distribution]
    drawn = {"distribution": distribution}
    for times, num_warps in ((1, 4), (0.5, 4), (4, 8)):
        num_blocks = int(tile.num_blocks * times)
        monkeypatch.setitem(gpu.TILES, distribution, tile._replace(num_blocks=num_blocks))
        monkeypatch.setattr(gpu, "NUM_WARPS", num_warps)
        shard, _ = stored(torch.bfloat16, "stochastic", device, count=5003)
        perturbed = gpu.TritonNoise().perturb(shard, KEY, PARAMETER, [0.1, -0.1], **drawn)
        gpu.TritonNoise().update_(shard, 3, PARAMETER, [Update(KEY, -0.7)], "stochastic", **drawn)
        found.append([*perturbed, shard, gpu.TritonNoise().draw(KEY, PARAMETER, 9, 5003, device, **drawn)])
    for others in found[1:]:
        for actual, expected in zip(others, found[0], strict=True):
            assert_same_bits(actual, expected)


SHARD = torch.zeros(8, dtype=torch.bfloat16)
LOW = torch.zeros(8, dtype=torch.int16)
ROW = torch.zeros(1, dtype=torch.int64)
STEPS = [Update(0, 0.1)]
MISTAKES = {
    "key must be": lambda noise: noise.draw(-1, 0, 0, 4, CPU),
    "key must be an unsigned": lambda noise: noise.update_(SHARD, 0, 0, [Update(2**64, 0.1)], "nearest"),
    "parameter_id must be": lambda noise: noise.draw(0, 2**32, 0, 4, CPU),
    r"must lie in \[0, 2": lambda noise: noise.draw(0, 0, 2**40 - 3, 4, CPU),
    "must be fp32, bf16 or fp16": lambda noise: noise.perturb(SHARD.double(), 0, 0, [0.1]),
    "got 1-D and 1-D": lambda noise: noise.perturb_rows(SHARD, ROW, 0, 0, [0.1]),
    "1-D torch.int32": lambda noise: noise.perturb_rows(SHARD.view(2, 4), ROW.int(), 0, 0, [0.1]),
    "flat, contiguous": lambda noise: noise.update_(SHARD[::2], 0, 0, STEPS, "nearest"),
    "and no low bits": lambda noise: noise.update_(SHARD, 0, 0, STEPS, "fp32_master"),
    "contiguous int16": lambda noise: noise.update_(SHARD, 0, 0, STEPS, "fp32_master", LOW[:4]),
    "and low bits": lambda noise: noise.update_(SHARD, 0, 0, STEPS, "stochastic", LOW),
    "got 'uniform'": lambda noise: noise.draw(0, 0, 0, 4, CPU, "uniform"),
    "got 'rounded'": lambda noise: noise.update_(SHARD, 0, 0, STEPS, "rounded"),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_wrong_arguments_raise_value_errors(message):
    with pytest.raises(ValueError, match=message):
        MISTAKES[message](REFERENCE)


def test_the_backend_of_a_cpu_is_compiled():
    assert isinstance(noise_backend(CPU), CpuNoise)
