"""An update of a slice (ZeRO-3) or rectangle (tensor parallelism) has the bits of the whole one."""

import math

import pytest
import torch
from eager_noise import move_codes
from noise_cases import (
    CPU,
    IS_INTERPRETED,
    KEY,
    assert_same_bits,
    hashed,
    reference_of,
    stored,
    values_of_every_size,
)

from lezo_ds.errors import UserError
from lezo_ds.noise import Elements, Region, UpdateTarget
from lezo_ds.zo.laws import DenseLaw, LowRankLaw
from lezo_ds.zo.updates import Update

LAWS = {
    "dense, normal": DenseLaw("normal"),
    "dense, signs": DenseLaw("rademacher"),
    "rank 1, normal": LowRankLaw("normal", 1),
    "rank 3, signs": LowRankLaw("rademacher", 3),
    "rank 6, normal": LowRankLaw("normal", 6),
}
STORAGES = {
    "fp32": (torch.float32, "stochastic"),
    "bf16": (torch.bfloat16, "stochastic"),
    "bf16 with low bits": (torch.bfloat16, "fp32_master"),
    "fp16": (torch.float16, "stochastic"),
    "fp16 with low bits": (torch.float16, "fp32_master"),
    "codes in bf16": (torch.bfloat16, "codes"),
    "codes in fp16": (torch.float16, "codes"),
    "codes in fp32": (torch.float32, "codes"),
}
SHAPE = (13, 307)
SHAPE_OF_CODES = (21, 192)  # three groups a row
FLAT = [(0, 13 * 307), (5, 300), (300, 1000), (1228, 3991), (5, 5), (614, 614)]
RECTANGLES = [((2, 9), (3, 240)), ((0, 13), (128, 133)), ((10, 11), (5, 6)), ((4, 4), (3, 9))]
UPDATES = [Update(KEY, 0.01, 0.999), Update(2**64 - 1, -0.3, begins_step=False)]
UPDATES += [Update(7, 0.2, begins_step=False), Update(11, 0.5)]
"""Of a step of three directions, and of one of one."""
UPDATES_OF_CODES = [Update(KEY, 0.002, 0.99), Update(2**64 - 1, -3e-5, begins_step=False)]
UPDATES_OF_CODES += [Update(7, 0.02)]  # often beyond the end of a grid


def rectangle(rows, columns, width):
    num_columns = columns[1] - columns[0]
    return Region(rows[0] * width + columns[0], rows[1] - rows[0], num_columns, width)


def parts_of(shape):
    if shape == SHAPE:
        flat = [Region.run(first, end - first) for first, end in FLAT]
        return flat + [rectangle(rows, columns, shape[1]) for rows, columns in RECTANGLES]
    if shape == SHAPE_OF_CODES:  # whole groups
        flat = [Region.run(64 * 13, 64 * 29), Region.run(0, 0), Region.run(192 * 3, 192 * 7)]
        return [Region.run(0, math.prod(shape)), *flat, rectangle((0, 21), (128, 192), shape[1])]
    width = shape[1]
    flat = [(0, 6 * width), (1003, 5 * width + 7), (1008, 3 * width)]
    return [Region.run(first, end - first) for first, end in flat]


def whole_matrix(shape, storage):
    """Return all elements of a matrix, as they are stored."""
    count = math.prod(shape)
    dtype, precision = STORAGES[storage]
    elements = Elements(6, shape, Region.run(0, count))
    if precision != "codes":
        values, low = stored(values_of_every_size(count), dtype, precision)
        return UpdateTarget(values, elements, low)
    codes = (hashed(count) % 256).to(torch.uint8)
    steps = (hashed(count // 64) % 97 + 1) / 2**14
    steps[5] = 0  # a group without a range
    grid = torch.stack([steps, (hashed(count // 64) % 89 - 60) / 2**7])
    return UpdateTarget(codes, elements, grid=grid.to(dtype))


def part_of(whole, region, device):
    """Return a copy of some elements of a matrix on a device."""
    places = region.indices(0, region.size, CPU)
    low, grid = whole.low, whole.grid
    if low is not None:
        low = low[places].to(device)
    if grid is not None:  # a rank may store padding, here of two groups
        grid = torch.cat([grid[:, places[::64] // 64], grid[:, :2]], dim=1).to(device)
    elements = whole.elements._replace(region=region)
    return UpdateTarget(whole.values[places].to(device), elements, low, grid)


def assert_parts_follow(backend, law, shape, storage):
    """Update a matrix by the reference, and its parts by a backend."""
    directions_of, device = backend
    precision = STORAGES[storage][1]
    is_of_codes = precision == "codes"
    updates = UPDATES_OF_CODES if is_of_codes else UPDATES
    before, whole = (whole_matrix(shape, storage) for _ in range(2))
    reference_of(law).update([whole], updates, "fp32_master" if is_of_codes else precision)
    if is_of_codes:
        moved = whole.values != before.values
        assert moved.float().mean() > 0.5 and not moved.view(-1, 64)[5].any()
    for region in parts_of(shape):
        part = part_of(before, region, device)
        directions_of(law).update([part], updates, "stochastic" if is_of_codes else precision)
        expected = part_of(whole, region, CPU)
        assert_same_bits(part.values, expected.values)
        if part.low is not None:
            assert_same_bits(part.low, expected.low)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("law", [name for name in LAWS if name != "rank 6, normal"])
def test_parts_of_a_matrix_get_the_bits_of_the_reference(backend, law, storage):
    is_slow = {"fp16", "codes in fp16", "codes in fp32"}
    if IS_INTERPRETED and storage in is_slow:
        pytest.skip("the interpreter is slow")
    shape = SHAPE_OF_CODES if storage.startswith("codes") else SHAPE
    assert_parts_follow(backend, LAWS[law], shape, storage)


# More columns than the kernels take at once: on a CPU, and on a GPU with and without blocks that
# touch two rows.
@pytest.mark.parametrize("num_columns", [2001, 2201, 2208])
@pytest.mark.parametrize("storage", ["bf16", "bf16 with low bits"])
def test_wide_matrices_get_the_bits_of_the_reference(backend, storage, num_columns):
    assert_parts_follow(backend, LAWS["rank 6, normal"], (6, num_columns), storage)


def test_vectors_of_some_rows_and_columns_are_parts_of_the_whole_ones(backend):
    directions_of, device = backend
    noise = directions_of(LowRankLaw("normal", rank=2))
    whole = Elements.all_of(6, SHAPE)
    part = whole._replace(region=rectangle((3, 9), (100, 307), 307))
    keys = [KEY, 5]
    a, b = noise.vectors(whole, keys, device)
    some_of_a, some_of_b = noise.vectors(part, keys, device)
    assert a.shape == (4, 13)
    assert_same_bits(some_of_a, a[:, 3:9].contiguous())
    assert_same_bits(some_of_b, b[:, 100:].contiguous())
    # a and b of the ranks of two directions, about as independent as 4 * 320 normals are.
    everything = torch.cat([a.flatten(), b.flatten()])
    assert abs(float(everything.mean())) < 0.1
    assert abs(float(everything.var()) - 1) < 0.15


def test_values_of_an_own_law_may_be_views_and_have_one_dtype_and_shape(backend):
    directions_of, device = backend
    kernels = directions_of(LowRankLaw("normal", rank=2)).kernels_of(device)
    u = values_of_every_size(2 * 13).nan_to_num().clamp(-1, 1).view(2, 13).to(device)
    b = values_of_every_size(307).nan_to_num().clamp(-1, 1).to(device)

    def subtracted(u, b):
        values = torch.zeros(math.prod(SHAPE), device=device)
        target = UpdateTarget(values, Elements.all_of(6, SHAPE))
        kernels.subtract(target, u, b, Update(KEY, 1.0), "stochastic")
        return values

    plain = subtracted(u, torch.stack([b, b]))
    assert plain.any()
    assert_same_bits(subtracted(u.t().contiguous().t(), b.expand(2, -1)), plain)
    for wrong, shown in (
        (b.double().expand(2, -1), r"b of .* torch.float64 \[2, 307\] on"),
        (b[1:].expand(2, -1), r"\[2, 306\] on .*, expected torch.float32 \[2, 307\]"),
    ):
        with pytest.raises(UserError, match=shown):
            subtracted(u, wrong)


def test_a_code_moves_by_the_update_on_average_and_stays_in_its_grid():
    codes = torch.full((6400,), 128, dtype=torch.uint8)
    grid = torch.tensor([[0.5], [-64.0]]).repeat(1, 100)
    part = UpdateTarget(codes, Elements.all_of(1, (6400,)), grid=grid)
    words = hashed(6400)
    for delta, mean in ((0.0, 128), (0.1, 127.8), (-0.6, 129.2), (500.0, 0), (-500.0, 255)):
        codes.fill_(128)
        move_codes(part, 1.0, torch.full((6400,), delta), words)
        assert codes.float().mean() == pytest.approx(mean, abs=0.02)
