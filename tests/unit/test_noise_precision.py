import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lezo_ds.noise import Update, join_master, noise_backend, split_master
from lezo_ds.noise.precision import round_stochastic

CPU = torch.device("cpu")
SIXTEEN_BITS = [torch.bfloat16, torch.float16]
BIT_PATTERNS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=200)


def from_bits(patterns):
    return torch.tensor(patterns, dtype=torch.int32).view(torch.float32)


@settings(deadline=None)
@given(BIT_PATTERNS)
def test_a_bf16_master_keeps_every_bit_pattern(patterns):
    values = from_bits(patterns)
    high, low = split_master(values, torch.bfloat16)
    assert torch.equal(join_master(high, low).view(torch.int32), values.view(torch.int32))


@settings(deadline=None)
@given(BIT_PATTERNS)
def test_the_high_part_of_a_bf16_master_is_a_nearest_bf16(patterns):
    values = from_bits(patterns)
    values = values[values.abs() < 3e38]
    high, _ = split_master(values, torch.bfloat16)
    assert torch.equal(
        (high.double() - values.double()).abs(), (values.bfloat16().double() - values.double()).abs()
    )


@settings(deadline=None)
@given(st.lists(st.floats(2**-14, 65519, width=32), min_size=1, max_size=200), st.sampled_from([1, -1]))
def test_an_fp16_master_keeps_every_value_in_the_normal_range(numbers, sign):
    values = sign * torch.tensor(numbers, dtype=torch.float32)
    high, low = split_master(values, torch.float16)
    assert torch.equal(high, values.half())
    assert low.abs().max() <= 16384
    assert torch.equal(join_master(high, low), values)


@settings(deadline=None)
@given(st.lists(st.floats(-(2**-14), 2**-14, width=32), min_size=1, max_size=200))
def test_a_tiny_fp16_master_is_kept_within_two_to_the_minus_40(numbers):
    values = torch.tensor(numbers, dtype=torch.float32)
    high, low = split_master(values, torch.float16)
    assert torch.equal(high, values.half())
    assert (join_master(high, low).double() - values.double()).abs().max() <= 2.0**-40


def test_a_value_beyond_fp16_becomes_infinite_and_nan_stays_nan():
    high, low = split_master(torch.tensor([65520.0, -1e30, float("inf"), float("nan")]), torch.float16)
    joined = join_master(high, low)
    assert joined[:3].tolist() == [float("inf"), -float("inf"), float("inf")]
    assert joined[3].isnan()
    assert low is not None and not low.any()


def test_fp32_needs_no_low_part():
    values = torch.tensor([1.0, -3e-39])
    high, low = split_master(values, torch.float32)
    assert low is None
    assert torch.equal(join_master(high, low), values)


# Values, with the number of dither bits that decide: 16 in bf16, 13 in fp16, 20 in its subnormals.
ROUNDINGS = [
    (torch.bfloat16, 16, [0.02, -1.7, 3.1e-5, 255.7, 1.1e-39]),
    (torch.float16, 13, [0.02, -1.7, 2.0**-14 * 1.0003, 6.2e-5, 1023.7]),
    (torch.float16, 20, [6.1e-5, -3.3e-6, 1.25 * 2.0**-24, -(2.0**-26), 2.0**-44]),
]
CASES = [(dtype, num_bits, value) for dtype, num_bits, values in ROUNDINGS for value in values]


@pytest.mark.parametrize(("dtype", "num_bits", "value"), CASES)
def test_stochastic_rounding_picks_a_neighbour_and_is_right_on_average(dtype, num_bits, value):
    words = torch.arange(1 << num_bits)
    values = torch.full((len(words),), value, dtype=torch.float32)
    rounded = round_stochastic(values, words, dtype)
    exact = values[0].double()
    below, above = rounded.double().min(), rounded.double().max()
    assert below <= exact <= above
    patterns = rounded.view(torch.int16).unique()
    assert len(patterns) == 2
    assert patterns[1] - patterns[0] == 1
    # Over all words the mean is the value itself; fp16's subnormals are cut off at the 44th place.
    tolerance = 2.0**-44 if num_bits == 20 else 0.0
    assert abs(rounded.double().mean() - exact) <= tolerance


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_stochastic_rounding_leaves_what_the_format_can_hold(dtype):
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    patterns = patterns[~patterns.isnan()]
    for word in (0, 2**32 - 1):
        rounded = round_stochastic(patterns.float(), torch.full((len(patterns),), word), dtype)
        assert torch.equal(rounded.view(torch.int16), patterns.view(torch.int16))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_stochastic_rounding_keeps_nan_and_infinity(dtype):
    values = from_bits([0x7FFFFFFF, -1, 0x7F800001, 0x7F800000])
    rounded = round_stochastic(values, torch.full((4,), 2**32 - 1), dtype)
    assert rounded[:3].isnan().all()
    assert rounded[3] == float("inf")


# How much of many tiny updates arrives: the projection of the weights' change on their exact sum.
# Steps of about 3e-6 (learning rate 1e-7, projected gradient 30) against weights of about 0.02, where half a
# unit in the last place is 6e-5 in bf16 and 8e-6 in fp16, which gets steps a tenth as large.
SIGNAL = [
    (torch.bfloat16, 3e-6, "stochastic", 0.9, 1.1),
    (torch.bfloat16, 3e-6, "fp32_master", 0.999, 1.001),
    (torch.bfloat16, 3e-6, "nearest", -0.1, 0.5),
    (torch.float16, 3e-7, "stochastic", 0.9, 1.1),
    (torch.float16, 3e-7, "fp32_master", 0.999, 1.001),
    (torch.float16, 3e-7, "nearest", -0.1, 0.5),
]


@pytest.mark.parametrize(("dtype", "size", "precision", "least", "most"), SIGNAL)
def test_tiny_updates_survive_stochastic_and_master_storage_only(dtype, size, precision, least, most, capsys):
    num_elements, num_steps = 50_000, 1000
    noise = noise_backend(CPU)
    generator = torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(num_elements, generator=generator)).to(dtype)
    coefficients = torch.randn(num_steps, generator=generator) * size
    steps = [Update(1000 + index, float(coefficient)) for index, coefficient in enumerate(coefficients)]

    exact = torch.zeros(num_elements, dtype=torch.float64)
    for step in steps:
        exact -= step.coefficient * noise.draw(step.key, 4, 0, num_elements, CPU).double()

    if precision == "fp32_master":
        shard, low = split_master(start.float(), dtype)
    else:
        shard, low = start.clone(), None
    noise.update_(shard, 0, 4, steps, precision, low)
    change = join_master(shard, low).double() - start.double()
    kept = float(change @ exact / (exact @ exact))
    with capsys.disabled():
        print(f"\n{dtype} {precision}: {kept:.4f} of the update signal kept", end="")
    assert least <= kept <= most
