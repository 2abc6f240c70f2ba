"""Codes of 8 bits are updated where they are, with the same bits in every backend and layout."""

import math

import pytest
import torch
from eager_noise import EagerLowRankKernels, EagerNoise, move_codes
from noise_cases import DISTRIBUTIONS, KEY, hashed
from test_noise import IS_INTERPRETED, TRITON

from lezo_ds.forward.dense import DenseDirections
from lezo_ds.forward.low_rank import LowRankDirections
from lezo_ds.noise import Elements, Region, UpdateTarget
from lezo_ds.noise.cpu import CpuKernels
from lezo_ds.zo.laws import DenseLaw, LowRankLaw
from lezo_ds.zo.updates import Update

CPU = torch.device("cpu")
SHAPE = (21, 192)  # three groups a row
UPDATES = [
    Update(KEY, 0.002, 0.99),
    Update(2**64 - 1, -3e-5, begins_step=False),
    Update(7, 0.02),  # often beyond the end of a grid
]


@pytest.fixture(params=["cpu", TRITON])
def kernels(request):
    if request.param == "cpu":
        return CpuKernels(), CPU
    if not (IS_INTERPRETED or torch.cuda.is_available()):
        pytest.skip("no GPU")
    from lezo_ds.noise.gpu import TritonKernels

    device = CPU if IS_INTERPRETED else torch.device("cuda")
    return TritonKernels(device), device


def whole(dtype):
    """The codes of a matrix, and the grid of its groups: one of them has no range."""
    count = math.prod(SHAPE)
    codes = (hashed(count) % 256).to(torch.uint8)
    steps = (hashed(count // 64) % 97 + 1) / 2**14
    steps[5] = 0
    grid = torch.stack([steps, (hashed(count // 64) % 89 - 60) / 2**7])
    return codes, grid.to(dtype)


def target(codes, grid, region, device):
    """The elements of a region of the matrix, which are whole groups; a rank may store padding."""
    places = region.indices(0, region.size, CPU)
    of_groups = torch.cat([grid[:, places[::64] // 64], grid[:, :2]], dim=1)
    elements = Elements(6, SHAPE, region)
    return UpdateTarget(codes[places].to(device), elements, grid=of_groups.to(device))


ALL = Region.run(0, math.prod(SHAPE))
PARTS = [
    Region.run(64 * 13, 64 * 29),  # of ZeRO-3
    Region.run(0, 0),
    Region(64, 21, 128, 192),  # columns 64 to 191, of tensor parallelism
    Region.run(192 * 3, 192 * 7),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("rank", [0, 2])
def test_codes_move_as_in_the_reference_in_any_part(kernels, dtype, distribution, rank):
    own, device = kernels
    if IS_INTERPRETED and dtype == torch.float32:
        pytest.skip("the interpreter is slow")
    if rank:
        law = LowRankLaw(distribution, rank)
        noise = LowRankDirections(law, kernels_of=lambda _: own)
        reference = LowRankDirections(law, kernels_of=lambda _: EagerLowRankKernels())
    else:
        law = DenseLaw(distribution)
        noise, reference = DenseDirections(law, kernels_of=lambda _: own), EagerNoise(law)
    codes, grid = whole(dtype)
    expected = target(codes, grid, ALL, CPU)
    reference.update([expected], UPDATES, "fp32_master")
    moved = expected.values != codes
    assert moved.float().mean() > 0.5 and not moved.view(-1, 64)[5].any()
    for region in [ALL, *PARTS]:
        part = target(codes, grid, region, device)
        for update in UPDATES if rank == 0 else [UPDATES]:
            noise.update([part], [update] if rank == 0 else update, "stochastic")
        places = region.indices(0, region.size, CPU)
        assert torch.equal(part.values.cpu(), expected.values[places])


def test_a_code_moves_by_the_update_on_average_and_stays_in_its_grid():
    codes = torch.full((6400,), 128, dtype=torch.uint8)
    grid = torch.tensor([[0.5], [-64.0]]).repeat(1, 100)
    part = UpdateTarget(codes, Elements.all_of(1, (6400,)), grid=grid)
    words = hashed(6400)
    for delta, mean in ((0.0, 128), (0.1, 127.8), (-0.6, 129.2), (500.0, 0), (-500.0, 255)):
        codes.fill_(128)
        move_codes(part, 1.0, torch.full((6400,), delta), words)
        assert codes.float().mean() == pytest.approx(mean, abs=0.02)
