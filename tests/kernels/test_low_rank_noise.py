"""Directions of low rank have the same bits in every backend, for every part of a matrix."""

import functools
import math

import pytest
import torch
from eager_noise import EagerLowRankKernels
from noise_cases import DISTRIBUTIONS, DTYPES, KEY, PRECISIONS, stored, values_of_every_size
from test_noise import IS_INTERPRETED, TRITON, assert_same_bits

from lezo_ds.errors import UserError
from lezo_ds.forward.low_rank import LowRankDirections
from lezo_ds.noise import Elements, Region, UpdateTarget
from lezo_ds.zo.laws import LowRankLaw
from lezo_ds.zo.updates import Update

CPU = torch.device("cpu")
SHAPE = (13, 307)
ALL = Elements.all_of(6, SHAPE)
UPDATES = [
    Update(KEY, 0.01, 0.999),
    Update(2**64 - 1, -0.3, begins_step=False),
    Update(7, 0.2, begins_step=False),
    Update(11, 0.5),
]
"""Of a step of three directions, and of one of one."""


@pytest.fixture(params=["cpu", TRITON])
def backend(request):
    """A function that returns the backend of a law, and its device."""
    if request.param == "cpu":
        return LowRankDirections, CPU
    if not (IS_INTERPRETED or torch.cuda.is_available()):
        pytest.skip("no GPU")
    from lezo_ds.noise.gpu import TritonKernels

    device = CPU if IS_INTERPRETED else torch.device("cuda")
    kernels = TritonKernels(device)
    return functools.partial(LowRankDirections, kernels_of=lambda _: kernels), device


def eager(law):
    """The reference of the kernels."""
    return LowRankDirections(law, kernels_of=lambda _: EagerLowRankKernels())


def updated(noise, values, low, region, precision, device=CPU, shape=SHAPE):
    """The elements of a region after the updates, and their low bits."""
    values = values.to(device, copy=True)
    low = None if low is None else low.to(device, copy=True)
    target = UpdateTarget(values, Elements(6, shape, region), low)
    noise.update([target], UPDATES, precision)
    return values, low


# Rows and columns of the part that a rank has; of a flat part, its first element and its end.
FLAT = [(0, 13 * 307), (5, 300), (300, 1000), (1228, 3991), (5, 5), (614, 614)]
RECTANGLES = [((2, 9), (3, 240)), ((0, 13), (128, 133)), ((10, 11), (5, 6)), ((4, 4), (3, 9))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_parts_of_a_matrix_get_the_bits_of_the_reference(backend, dtype, precision):
    backend_of, device = backend
    if IS_INTERPRETED and dtype == torch.float16:
        pytest.skip("the interpreter is slow")
    for place, distribution in enumerate(DISTRIBUTIONS):
        law = LowRankLaw(distribution, rank=1 + 2 * place)
        noise = backend_of(law)
        values, low = stored(values_of_every_size(math.prod(SHAPE)), dtype, precision)
        full, full_low = updated(eager(law), values, low, ALL.region, precision)
        for first, end in FLAT:
            part_low = None if low is None else low[first:end]
            region = Region.run(first, end - first)
            part = updated(noise, values[first:end], part_low, region, precision, device)
            assert_same_bits(part[0], full[first:end])
            if low is not None:
                assert_same_bits(part[1], full_low[first:end])
        for rows, columns in RECTANGLES:
            where = (slice(*rows), slice(*columns))
            width = columns[1] - columns[0]
            region = Region(rows[0] * 307 + columns[0], rows[1] - rows[0], width, 307)
            part_low = None if low is None else low.view(SHAPE)[where].flatten()
            mine = values.view(SHAPE)[where].flatten()
            part = updated(noise, mine, part_low, region, precision, device)
            assert_same_bits(part[0], full.view(SHAPE)[where].flatten())
            if low is not None:
                assert_same_bits(part[1], full_low.view(SHAPE)[where].flatten())


# More columns than the kernels take at once: on a CPU, and on a GPU with and without blocks that
# touch two rows.
@pytest.mark.parametrize("num_columns", [2001, 2201, 2208])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_wide_matrices_get_the_bits_of_the_reference(backend, precision, num_columns):
    backend_of, device = backend
    shape = (6, num_columns)
    law = LowRankLaw("normal", rank=6)
    values, low = stored(values_of_every_size(math.prod(shape)), torch.bfloat16, precision)
    whole = Region.run(0, values.numel())
    full, full_low = updated(eager(law), values, low, whole, precision, shape=shape)
    for first, end in [(0, values.numel()), (1003, 5 * num_columns + 7), (1008, 3 * num_columns)]:
        my_low = None if low is None else low[first:end]
        region = Region.run(first, end - first)
        mine, my_low = updated(
            backend_of(law), values[first:end], my_low, region, precision, device, shape
        )
        assert_same_bits(mine, full[first:end])
        if low is not None:
            assert_same_bits(my_low, full_low[first:end])


def test_vectors_of_some_rows_and_columns_are_parts_of_the_whole_ones(backend):
    backend_of, device = backend
    noise = backend_of(LowRankLaw("normal", rank=2))
    part = ALL._replace(region=Region(3 * 307 + 100, 6, 207, 307))
    keys = [KEY, 5]
    a, b = noise.vectors(ALL, keys, device)
    some_of_a, some_of_b = noise.vectors(part, keys, device)
    assert a.shape == (4, 13)
    assert_same_bits(some_of_a, a[:, 3:9].contiguous())
    assert_same_bits(some_of_b, b[:, 100:].contiguous())
    # a and b of the ranks of two directions, about as independent as 4 * 320 normals are.
    everything = torch.cat([a.flatten(), b.flatten()])
    assert abs(float(everything.mean())) < 0.1
    assert abs(float(everything.var()) - 1) < 0.15


def test_values_of_an_own_law_may_be_views_and_have_one_dtype_and_shape(backend):
    backend_of, device = backend
    kernels = backend_of(LowRankLaw("normal", rank=2)).kernels_of(device)
    u = values_of_every_size(2 * 13).nan_to_num().clamp(-1, 1).view(2, 13).to(device)
    b = values_of_every_size(307).nan_to_num().clamp(-1, 1).to(device)

    def subtracted(u, b):
        values = torch.zeros(math.prod(SHAPE), device=device)
        kernels.subtract(UpdateTarget(values, ALL), u, b, Update(KEY, 1.0), "stochastic")
        return values

    plain = subtracted(u, torch.stack([b, b]))
    assert plain.any()
    assert_same_bits(subtracted(u.t().contiguous().t(), b.expand(2, -1)), plain)
    for wrong, shown in (
        (b.double().expand(2, -1), r"b of .* torch.float64 \[2, 307\] on"),
        (b.expand(1, -1), r"\[1, 307\] on .*, expected torch.float32 \[2, 307\]"),
        (b[1:].expand(2, -1), r"\[2, 306\] on"),
    ):
        with pytest.raises(UserError, match=shown):
            subtracted(u, wrong)
