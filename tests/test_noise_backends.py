"""One suite that every backend passes: it gives the bits of the eager reference.

The Triton backend runs where there is a CUDA device, or in Triton's interpreter (TRITON_INTERPRET=1, see
test_noise_triton.py), which is slow: hence the small tensors.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from lezo_ds.noise import gaussian, noise_backend, split_master
from lezo_ds.noise.bit_sum import MODULUS, bit_sum
from lezo_ds.noise.cpu import CpuNoise
from lezo_ds.noise.eager import EagerNoise

REFERENCE = EagerNoise()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PRECISIONS = ["stochastic", "fp32_master", "nearest"]
GOLDEN = json.loads((Path(__file__).parent / "golden" / "noise.json").read_text())


TRITON = ["triton"] if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" else []


@pytest.fixture(params=["eager", "cpu", *TRITON])
def backend_and_device(request):
    if request.param == "triton":
        from lezo_ds.noise.gpu import TritonNoise

        return TritonNoise(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return (EagerNoise() if request.param == "eager" else CpuNoise()), torch.device("cpu")


def bits(tensor):
    """The bit patterns, all NaN alike: their payload is no part of the contract."""
    if tensor.dtype == torch.int16:
        return tensor.cpu()
    patterns = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    return patterns.where(~tensor.isnan(), -1).cpu()


def assert_same_bits(actual, expected):
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


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["what"])
def test_the_noise_has_its_golden_bits(backend_and_device, case):
    noise, device = backend_and_device
    count = len(case["normal"])
    z = noise.normal(case["seed"], case["parameter_id"], case["start"], count, device)
    patterns = z.cpu().view(torch.int32)
    assert [f"{int(pattern) & 0xFFFFFFFF:08x}" for pattern in patterns] == case["normal"]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["what"])
def test_the_dither_has_its_golden_bits(case):
    where = (case["seed"], case["parameter_id"], case["start"], len(case["dither"]), torch.device("cpu"))
    assert [f"{int(word):08x}" for word in gaussian.dither_words(*where)] == case["dither"]


@pytest.mark.parametrize(
    ("start", "count"), [(0, 0), (0, 1), (1, 1), (3, 2), (0, 1024), (1021, 1030), (5, 2055)]
)
def test_normal_is_the_reference(backend_and_device, start, count):
    noise, device = backend_and_device
    seed, parameter_id = 2**63 + 12345, 77
    z = noise.normal(seed, parameter_id, start, count, device)
    assert_same_bits(z, REFERENCE.normal(seed, parameter_id, start, count, torch.device("cpu")))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_a_perturbed_pair_is_the_reference_and_two_single_ones(backend_and_device, dtype, out_dtype):
    noise, device = backend_and_device
    theta = values_of_every_size(1071).to(dtype).view(7, 9, 17)
    plus, minus = noise.perturb_pair(theta.to(device), 5, 6, 1e-3, out_dtype)
    expected = REFERENCE.perturb_pair(theta, 5, 6, 1e-3, out_dtype)
    assert_same_bits(plus, expected[0])
    assert_same_bits(minus, expected[1])
    assert_same_bits(noise.perturb(theta.to(device), 5, 6, 1e-3, out_dtype), plus)
    assert_same_bits(noise.perturb(theta.to(device), 5, 6, -1e-3, out_dtype), minus)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_perturbation_is_the_plain_formula_in_fp32(backend_and_device, dtype):
    noise, device = backend_and_device
    theta = values_of_every_size(515).to(dtype)
    z = gaussian.normal(5, 6, 0, 515, torch.device("cpu"))
    assert_same_bits(noise.perturb(theta.to(device), 5, 6, 0.01), (theta.float() + z * 0.01).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 13, 1, 1030])
def test_perturbed_rows_are_those_of_the_whole(backend_and_device, dtype, width):
    noise, device = backend_and_device
    theta = values_of_every_size(11 * width).to(dtype).view(11, width)
    rows = torch.tensor([3, 0, 10, 3, 7])
    for out_dtype in (dtype, torch.float32):
        expected = REFERENCE.perturb_pair(theta, 5, 6, 1e-3, out_dtype)
        plus, minus = noise.perturb_rows_pair(theta.to(device), rows.to(device), 5, 6, 1e-3, out_dtype)
        assert_same_bits(plus, expected[0][rows])
        assert_same_bits(minus, expected[1][rows])
    assert_same_bits(
        noise.perturb_rows(theta.to(device), rows.to(device), 5, 6, 1e-3),
        REFERENCE.perturb(theta, 5, 6, 1e-3)[rows],
    )


def test_a_transposed_parameter_is_perturbed_by_its_row_major_index(backend_and_device):
    noise, device = backend_and_device
    theta = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    transposed = noise.perturb(theta.t().contiguous().to(device).t(), 5, 6, 0.1)
    assert_same_bits(transposed, REFERENCE.perturb(theta, 5, 6, 0.1))


def test_empty_parameters_and_no_rows_are_fine(backend_and_device):
    noise, device = backend_and_device
    assert noise.perturb(torch.empty(0, 3, device=device), 5, 6, 0.1).shape == (0, 3)
    no_rows = torch.empty(0, dtype=torch.int64, device=device)
    assert noise.perturb_rows(torch.ones(2, 3, device=device), no_rows, 5, 6, 0.1).shape == (0, 3)
    noise.update_(torch.empty(0, device=device), 10, 5, 6, 0.1, "nearest")


def stored(dtype, precision, count=1101):
    values = values_of_every_size(count)
    if precision == "fp32_master":
        return split_master(values, dtype)
    return values.to(dtype), None


def on(device, shard, low):
    return shard.clone().to(device), None if low is None else low.clone().to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("start", "coefficient"), [(0, 1e-3), (4099, -0.7), (2**34 + 2, 3e-7)])
def test_an_update_is_the_reference(backend_and_device, dtype, precision, start, coefficient):
    noise, device = backend_and_device
    shard, low = stored(dtype, precision)
    expected, expected_low = on("cpu", shard, low)
    REFERENCE.update_(expected, start, 5, 6, coefficient, precision, expected_low)
    actual, actual_low = on(device, shard, low)
    noise.update_(actual, start, 5, 6, coefficient, precision, actual_low)
    assert_same_bits(actual, expected)
    if low is not None:
        assert_same_bits(actual_low, expected_low)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_updates_at_once_are_the_updates_one_by_one(backend_and_device, dtype, precision):
    noise, device = backend_and_device
    steps = [(2**64 - 1, 1e-2), (0, -3e-4), (12345678901234567890, 0.5)]
    one_by_one, one_by_one_low = on(device, *stored(dtype, precision))
    at_once, at_once_low = on(device, *stored(dtype, precision))
    for seed, coefficient in steps:
        noise.update_(one_by_one, 7, seed, 6, coefficient, precision, one_by_one_low)
    noise.update_many_(at_once, 7, 6, steps, precision, at_once_low)
    assert_same_bits(at_once, one_by_one)
    if at_once_low is not None:
        assert_same_bits(at_once_low, one_by_one_low)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("count", [11, 5003])
def test_an_update_adds_up_the_bits_that_it_finds_and_leaves(backend_and_device, dtype, precision, count):
    noise, device = backend_and_device
    shard, low = on(device, *stored(dtype, precision, count))
    before = bit_sum(shard, low)
    sums = torch.tensor([-5, 2**40], device=device)
    noise.update_(shard, 3, 5, 6, -0.7, precision, low, sums)
    assert (sums % MODULUS).tolist() == [(before - 5) % MODULUS, bit_sum(shard, low)]
    assert before != bit_sum(shard, low)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_updates_of_the_slices_are_the_slices_of_the_update(backend_and_device, precision):
    noise, device = backend_and_device
    whole, whole_low = on(device, *stored(torch.bfloat16, precision))
    parts, parts_low = on(device, *stored(torch.bfloat16, precision))
    noise.update_(whole, 0, 5, 6, 0.01, precision, whole_low)
    for first, last in ((0, 367), (367, 734), (734, 1101)):
        part_low = None if parts_low is None else parts_low[first:last]
        noise.update_(parts[first:last], first, 5, 6, 0.01, precision, part_low)
    assert_same_bits(parts, whole)


def test_wrong_arguments_raise_value_errors(backend_and_device):
    noise, device = backend_and_device
    shard = torch.zeros(8, dtype=torch.bfloat16, device=device)
    low = torch.zeros(8, dtype=torch.int16, device=device)
    mistakes = [
        lambda: noise.normal(-1, 0, 0, 4, device),
        lambda: noise.normal(2**64, 0, 0, 4, device),
        lambda: noise.normal(0, 2**32, 0, 4, device),
        lambda: noise.normal(0, 0, 2**40 - 3, 4, device),
        lambda: noise.perturb(shard.double(), 0, 0, 0.1),
        lambda: noise.perturb_rows(shard, torch.zeros(1, dtype=torch.int64), 0, 0, 0.1),
        lambda: noise.perturb_rows(shard.view(2, 4), torch.zeros(1, dtype=torch.int32), 0, 0, 0.1),
        lambda: noise.update_(shard[::2], 0, 0, 0, 0.1, "nearest"),
        lambda: noise.update_(shard, 0, 0, 0, 0.1, "fp32_master"),
        lambda: noise.update_(shard, 0, 0, 0, 0.1, "fp32_master", low[:4]),
        lambda: noise.update_(shard, 0, 0, 0, 0.1, "stochastic", low),
        lambda: noise.update_(shard, 0, 0, 0, 0.1, "rounded"),
    ]
    for mistake in mistakes:
        with pytest.raises(ValueError):
            mistake()


def test_the_backend_of_a_cpu_is_compiled():
    assert isinstance(noise_backend(torch.device("cpu")), CpuNoise)
