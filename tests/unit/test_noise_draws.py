import math
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lezo_ds.noise.philox import NORMAL_STREAM, RADEMACHER_STREAM, words_of_blocks

from lezo_ds.noise import Distribution, gaussian
from lezo_ds.noise.draws import dither_words, draw

CPU = torch.device("cpu")
KEYS = st.integers(0, 2**64 - 1)
PARAMETER_IDS = st.integers(0, 2**32 - 1)


every_distribution = pytest.mark.parametrize("distribution", get_args(Distribution))


def million(distribution="normal"):
    return draw(distribution, 2024, 5, 0, 1_000_000, CPU).double()


@settings(deadline=None, max_examples=50)
@given(KEYS, PARAMETER_IDS, st.integers(0, 2**40 - 600), st.integers(1, 300), st.integers(0, 299), st.data())
def test_any_slice_holds_the_values_of_the_whole(key, parameter_id, start, count, skip, data):
    skip = min(skip, count - 1)
    length = data.draw(st.integers(1, count - skip))
    for function in (partial(draw, "normal"), partial(draw, "rademacher"), dither_words):
        whole = function(key, parameter_id, start, count, CPU)
        part = function(key, parameter_id, start + skip, length, CPU)
        assert torch.equal(part, whole[skip : skip + length])


def test_the_noise_is_box_muller_of_the_philox_words():
    blocks = torch.arange(1 << 18)
    words = words_of_blocks(3, 1, blocks, NORMAL_STREAM)
    uniform = ((words[0] >> 9) * 2 + 1).double() / 2**24
    signed = ((words[1] << 2) & 0xFFFFFFFF).to(torch.int32).double()
    angle = (words[1] >> 30).double() * (math.pi / 2) + signed * (math.pi / 4 / 2**31)
    radius = (-2 * uniform.log()).sqrt()
    z = gaussian.normals_of_blocks(3, 1, blocks).double()
    assert (z[:, 0] - radius * angle.cos()).abs().max() < 4e-6
    assert (z[:, 1] - radius * angle.sin()).abs().max() < 4e-6


def test_the_signs_are_the_bits_of_the_philox_words():
    words = [int(word) for word in words_of_blocks(3, 1, torch.tensor(5), RADEMACHER_STREAM)]
    number = sum(word << (32 * place) for place, word in enumerate(words))
    signs = [-1.0 if number >> element & 1 else 1.0 for element in range(128)]
    assert draw("rademacher", 3, 1, 5 * 128, 128, CPU).tolist() == signs


def test_the_signs_are_fair():
    assert abs(million("rademacher").mean()) < 4e-3
    by_place = million("rademacher")[: 7812 * 128].view(-1, 128).mean(dim=0)
    assert by_place.abs().max() < 4.5 / math.sqrt(7812)


def test_the_moments_are_those_of_a_standard_normal():
    z = million()
    standard_error = 1e-3  # of the mean of a million draws
    assert abs(z.mean()) < 4 * standard_error
    assert abs(z.var() - 1) < 4 * math.sqrt(2) * standard_error
    assert abs((z**3).mean()) < 4 * math.sqrt(15) * standard_error
    assert abs((z**4).mean() - 3) < 4 * math.sqrt(96) * standard_error


def test_a_million_draws_pass_kolmogorov_and_smirnov():
    ordered = million().sort().values
    count = len(ordered)
    theory = torch.special.ndtr(ordered)
    above = (torch.arange(1, count + 1) / count - theory).max()
    below = (theory - torch.arange(count) / count).max()
    assert max(above, below) * math.sqrt(count) < 1.63  # the 1 % critical value


def correlation(a, b):
    return float((a.double() * b.double()).mean())


@every_distribution
@pytest.mark.parametrize(
    ("key", "parameter_id"), [(2025, 5), (2024 + 2**32, 5), (2024, 6), (2024, 5 + 2**31)]
)
def test_other_keys_and_parameters_have_uncorrelated_noise(key, parameter_id, distribution):
    other = draw(distribution, key, parameter_id, 0, 1_000_000, CPU)
    assert abs(correlation(million(distribution), other)) < 4e-3


def test_the_signs_are_uncorrelated_with_the_normals_of_the_same_key():
    assert abs(correlation(million("rademacher"), million())) < 4e-3


@every_distribution
@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 32, 128, 1024])
def test_neighboring_elements_are_uncorrelated(lag, distribution):
    z = million(distribution)
    assert abs(correlation(z[:-lag], z[lag:])) < 4e-3
    assert abs(correlation(z[:-lag] ** 2 - 1, z[lag:] ** 2 - 1)) < 4 * 2e-3


@every_distribution
def test_the_dither_is_uniform_and_uncorrelated_with_the_noise(distribution):
    words = dither_words(2024, 5, 0, 1_000_000, CPU)
    for num_bits in (13, 16, 20):  # the low bits that rounding uses
        uniform = (words & ((1 << num_bits) - 1)).double() / (1 << num_bits) - 0.5
        assert abs(uniform.mean()) < 4e-3 * math.sqrt(1 / 12)
        assert abs(uniform.var() - 1 / 12) < 1e-3
        assert abs(correlation(uniform * math.sqrt(12), million(distribution))) < 4e-3
