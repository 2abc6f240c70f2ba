"""Noise has the same bits in every backend and release; Triton's needs a GPU (pytest -m gpu)."""

import math

import pytest
import torch
from eager_noise import EagerNoise, draw, join_master, round_stochastic
from noise_cases import (
    CASES,
    DISTRIBUTIONS,
    GOLDEN,
    IS_INTERPRETED,
    KEY,
    PRECISIONS,
    assert_same_bits,
    at,
    digest,
    drawn,
    hashed,
    result,
    stored,
    target,
    values_of_every_size,
    weight,
)

from lezo_ds.noise import Region
from lezo_ds.noise.low_bits import split_master
from lezo_ds.noise.philox import DITHER_STREAM, words_at, words_of_blocks
from lezo_ds.zo.laws import DenseLaw
from lezo_ds.zo.updates import Update


@pytest.mark.parametrize("case", CASES)
def test_an_operation_has_the_bits_of_the_reference_and_its_golden_digest(backend, case):
    backend_of, device = backend
    place = list(CASES).index(case)
    if IS_INTERPRETED and (place // 3 + place) % 3 == 0:
        pytest.skip("the interpreter is slow: it runs each dtype with two of three others")
    found = result(backend_of, CASES[case], device)
    for actual, expected in zip(found, result(EagerNoise, CASES[case]), strict=True):
        assert_same_bits(actual, expected)
    assert digest(found) == GOLDEN["results"][case]


@pytest.mark.parametrize("golden", GOLDEN["draws"], ids=lambda golden: golden["what"])
def test_draws_have_their_golden_bits(backend, golden):
    backend_of, device = backend
    where = golden["key"], golden["parameter_id"], golden["start"]

    def words(tensor):
        return " ".join(f"{int(word) & 0xFFFFFFFF:08x}" for word in tensor)

    z = drawn(backend_of(DenseLaw()), *where, len(golden["normal"].split()), device)
    assert words(z.cpu().view(torch.int32)) == golden["normal"]
    signs = drawn(backend_of(DenseLaw("rademacher")), *where, len(golden["rademacher"]), device)
    assert "".join({1.0: "+", -1.0: "-"}[sign] for sign in signs.tolist()) == golden["rademacher"]
    elements = golden["start"] + torch.arange(len(golden["dither"].split()))
    assert words(words_at(*where[:2], elements, DITHER_STREAM)) == golden["dither"]


# The last is of whole blocks of either distribution.
RECTANGLES = [((2, 9), (3, 24), 133), ((0, 11), (128, 133), 133), ((10, 11), (5, 6), 133)]
RECTANGLES += [((1, 11), (128, 512), 640)]


@pytest.mark.parametrize(("rows", "columns", "width"), RECTANGLES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_rectangle_is_perturbed_as_its_elements(backend, distribution, rows, columns, width):
    backend_of, device = backend
    law = DenseLaw(distribution)
    theta = values_of_every_size(11 * width).bfloat16().view(11, width)
    part = (slice(*rows), slice(*columns))
    mine = theta[part].contiguous().to(device)
    region = Region(rows[0] * width + columns[0], *mine.shape, width)
    rectangle = weight(mine, 6, torch.float32, region=region)
    (copies,) = backend_of(law).perturb([rectangle], at(0.1, -0.1))
    (full,) = EagerNoise(law).perturb([weight(theta, 6, torch.float32)], at(0.1, -0.1))
    for copy, expected in zip(copies, full, strict=True):
        assert_same_bits(copy, expected[part])


def test_a_transposed_parameter_is_perturbed_by_its_row_major_index(backend):
    backend_of, device = backend
    noise = backend_of(DenseLaw())
    theta = values_of_every_size(35).view(5, 7)
    weights = [weight(theta.t().contiguous().to(device).t(), 6)]
    (copies,) = noise.perturb(weights, at(0.1, -0.1))
    (expected,) = EagerNoise(DenseLaw()).perturb([weight(theta, 6)], at(0.1, -0.1))
    for copy, plain in zip(copies, expected, strict=True):
        assert_same_bits(copy, plain)
    strided = torch.tensor([3, 9, 0, 9], device=device)[::2]
    ((rows,),) = noise.perturb([weights[0]._replace(rows=strided)], at(0.1))
    assert_same_bits(rows, copies[0][strided])
    later = weight(theta[3:].to(device), 6, rows=strided[:1] - 3, region=Region.run(3 * 7, 2 * 7))
    ((row,),) = noise.perturb([later], at(0.1))
    assert_same_bits(row, copies[0][3:4])


PI = "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0"
KNOWN_ANSWERS = {
    "ffffffff " * 6: "408f276d 41c83b0e a20bc7c6 6d5451fd",
    PI: "d16cfe09 94fdcceb 5001e420 24126ea1",
}
"""Of Random123 (Salmon et al. 2011): result by counter and key."""


@pytest.mark.parametrize("given", KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(given):
    c0, c1, parameter_id, stream, k0, k1 = (int(word, 16) for word in given.split())
    block = torch.tensor([c1 << 32 | c0], dtype=torch.uint64).view(torch.int64)
    (words,) = words_of_blocks(k1 << 32 | k0, parameter_id, block, stream)
    assert " ".join(f"{int(word):08x}" for word in words) == KNOWN_ANSWERS[given]


def test_a_million_draws_have_their_distribution_and_no_correlations():
    normal, signs = (draw(law, 2024, 5, 0, 1_000_000).double() for law in DISTRIBUTIONS)
    ordered = normal.sort().values
    above = (torch.arange(1, 1_000_001) / 1e6 - torch.special.ndtr(ordered)).abs().max()
    assert above * 1000 < 1.63  # Kolmogorov and Smirnov: the 1 % critical value
    assert abs(normal.var() - 1) < 4e-3 * math.sqrt(2)
    assert abs(signs.mean()) < 4e-3 and set(signs.tolist()) == {1.0, -1.0}
    assert signs[: 7812 * 128].view(-1, 128).mean(dim=0).abs().max() < 4.5 / math.sqrt(7812)
    dither = words_at(2024, 5, torch.arange(1_000_000), DITHER_STREAM)
    # The bits that rounding uses.
    uniform = [(dither & (2**n - 1)).double() / 2**n - 0.5 for n in (13, 16, 20)]
    assert all(abs(part.var() - 1 / 12) < 1e-3 for part in uniform)
    others = [signs, *(part * math.sqrt(12) for part in uniform)]
    for key, parameter_id in ((2025, 5), (2024 + 2**32, 5), (2024, 6), (2024, 5 + 2**31)):
        others.append(draw("normal", key, parameter_id, 0, 1_000_000).double())
    assert all(abs((normal * other).mean()) < 4e-3 for other in others)
    for lag in (1, 2, 3, 4, 7, 32, 128, 1024):
        assert all(abs((z[:-lag] * z[lag:]).mean()) < 4e-3 for z in (normal, signs))


def fp32(patterns):
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_a_bf16_master_keeps_every_bit_pattern_next_to_a_nearest_bf16():
    values = fp32((torch.arange(1 << 16) << 16 | hashed(1 << 16) >> 16).tolist())
    high, low = split_master(values, torch.bfloat16)
    assert_same_bits(join_master(high, low), values)
    assert torch.equal(high.isnan(), values.isnan())
    finite = values.abs() < 3e38
    error, least = (
        (part.double() - values.double()).abs()[finite] for part in (high, values.bfloat16())
    )
    assert torch.equal(error, least)


@pytest.mark.parametrize(("dtype", "pattern"), [(torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_nan_of_any_bits_is_stored_as_one_pattern(backend, dtype, pattern, precision):
    """Processors differ in the NaN that they compute, of which one would wrap to -0.0."""
    backend_of, device = backend
    numbers = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 1.0], device=device)
    values, low = stored(numbers, dtype, precision, device)
    noise = backend_of(DenseLaw())
    noise.update([target(values, 2, low=low)], [Update(KEY, 1e-3, -math.inf)], precision)
    noise.update([target(values, 2, low=low)], [Update(KEY, 1e-3, 0.0)], precision)
    assert values.view(torch.int16).tolist() == [pattern] * 5
    assert low is None or not low.any()
    high, low = split_master(fp32([0xFFC00000, 0x7FFFFFFF, 0x7F800001]), dtype)
    assert high.view(torch.int16).tolist() == [pattern] * 3 and not low.any()


def test_an_fp16_master_is_exact_in_the_normal_range_and_within_two_to_the_minus_40_below():
    values = values_of_every_size(100_000)
    high, low = split_master(values, torch.float16)
    assert_same_bits(high, values.half())
    joined, size = join_master(high, low), values.abs()
    normal = (size >= 2**-14) & (size < 65520)
    assert torch.equal(joined[normal], values[normal])
    assert low[normal].abs().max() <= 16384
    assert (joined.double() - values.double())[size < 2**-14].abs().max() <= 2.0**-40
    assert torch.equal(joined[size >= 65520], values[size >= 65520].half().float())
    assert not low[size >= 65520].any()


# Values, with the number of dither bits that decide: 16 in bf16, 13 in fp16, 20 in its subnormals.
ROUNDINGS = [
    (torch.bfloat16, 16, [0.02, -1.7, 3.1e-5, 1.1e-39]),
    (torch.float16, 13, [0.02, -1.7, 2.0**-14 * 1.0003, 1023.7]),
    (torch.float16, 20, [6.1e-5, -3.3e-6, 1.25 * 2.0**-24, -(2.0**-26), 2.0**-44]),
]


@pytest.mark.parametrize(("dtype", "num_bits", "numbers"), ROUNDINGS)
def test_stochastic_rounding_picks_a_neighbor_and_is_right_on_average(dtype, num_bits, numbers):
    words = torch.arange(1 << num_bits)
    for number in numbers:
        values = torch.full((len(words),), number)
        rounded = round_stochastic(values, words, dtype)
        exact = values[0].double()
        assert rounded.double().min() <= exact <= rounded.double().max()
        low, high = rounded.view(torch.int16).unique().tolist()
        assert high - low == 1
        # Over all words the mean is the value itself. fp16's subnormals are cut off at the 44th
        # place.
        assert abs(rounded.double().mean() - exact) <= (2.0**-44 if num_bits == 20 else 0.0)
