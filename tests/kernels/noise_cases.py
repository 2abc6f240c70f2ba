"""Operations of the noise on targets and weights of many kinds, and their results' digests."""

import functools
import hashlib
import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch
from eager_noise import EagerLowRankKernels, EagerNoise

from lezo_ds.forward.dense import DenseDirections, with_opposites
from lezo_ds.forward.low_rank import LowRankDirections
from lezo_ds.noise import Elements, Region, UpdateTarget, Weight
from lezo_ds.noise.cpu import CpuKernels
from lezo_ds.noise.low_bits import split_master
from lezo_ds.zo.laws import DenseLaw, LowRankLaw
from lezo_ds.zo.passes import KeyedProbe
from lezo_ds.zo.updates import Update

GOLDEN = json.loads((Path(__file__).parent / "golden" / "noise.json").read_text())
CPU = torch.device("cpu")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = pytest.param("triton", marks=() if IS_INTERPRETED else pytest.mark.gpu)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DISTRIBUTIONS = ("normal", "rademacher")
PRECISIONS = ("stochastic", "fp32_master")
KEY = 2**63 + 12345
SCALES = ([1e-3, -1e-3], [0.25, 0.0])
UPDATES = [Update(KEY, 0.01, 0.999), Update(2**64 - 1, -0.3), Update(0, 3e-7, 1 - 1e-6)]
SHAPES = [(7, 153), (2048,), (16, 8), (0, 3), (33,), (5, 1030), (9, 1)]
TARGETS = [(1104, 0), (1101, 0), (1040, 4096), (30, 7), (1056, 2**34 + 2), (5003, 4099), (0, 10)]
"""Numbers of elements and starts."""

# (operation, distribution, dtype, and dtype of the copies or precision) by name: each pair occurs.
CASES = {}
for operation, others in (("perturb", DTYPES), ("update", PRECISIONS)):
    for (i, dtype), (j, other) in itertools.product(enumerate(DTYPES), enumerate(others)):
        case = (operation, DISTRIBUTIONS[(i + j) % 2], dtype, other)
        CASES[" ".join(str(word).removeprefix("torch.") for word in case)] = case


@pytest.fixture(params=["cpu", TRITON])
def backend(request):
    """A function that returns the directions of a law, and their device."""
    if request.param == "cpu":
        return functools.partial(directions_of, CpuKernels()), CPU
    if not (IS_INTERPRETED or torch.cuda.is_available()):
        pytest.skip("no GPU")
    from lezo_ds.noise.gpu import TritonKernels

    device = CPU if IS_INTERPRETED else torch.device("cuda")
    return functools.partial(directions_of, TritonKernels(device)), device


def directions_of(kernels, law):
    kind = LowRankDirections if isinstance(law, LowRankLaw) else DenseDirections
    return kind(law, kernels_of=lambda _: kernels)


def reference_of(law):
    """What directions of a law do, in plain PyTorch."""
    if isinstance(law, LowRankLaw):
        return directions_of(EagerLowRankKernels(), law)
    return EagerNoise(law)


def hashed(count):
    """Integers of 32 bits without a pattern."""
    return torch.arange(1, count + 1) * 0x9E3779B1 % 2**32 * 0x85EBCA6B % 2**32


def values_of_every_size(count):
    """fp32 values from far below fp16's smallest to its overflow, and first some special ones."""
    bits = hashed(count)
    exponents = 97 + (bits >> 8) % 49  # 2**-30 to 2**18
    values = ((bits & 0x807FFFFF) | (exponents << 23)).to(torch.int32).view(torch.float32)
    infinity = float("inf")
    special = [0.0, -0.0, infinity, -infinity, float("nan")]
    special += [65504.0, 65519.9, 65520.0, 3.3e38, 1e-40]
    values[: len(special)] = torch.tensor(special)[:count]
    return values


def stored(values, dtype, precision, device="cpu"):
    """Values as they are stored, and their low bits or None."""
    if precision != "fp32_master" or dtype == torch.float32:
        return values.to(device, dtype, copy=True), None
    high, low = split_master(values, dtype)
    return high.to(device), low.to(device)


def target(values, parameter_id, start=0, low=None):
    """The elements from `start` on of a parameter, to update."""
    region = Region.run(start, values.numel())
    return UpdateTarget(values, Elements(parameter_id, values.shape, region), low)


def weight(theta, parameter_id, out_dtype=None, rows=None, region=None):
    """A parameter to perturb, whose copies have its own dtype by default."""
    elements = Elements(parameter_id, theta.shape, region or Region.run(0, theta.numel()))
    return Weight(theta, elements, out_dtype or theta.dtype, rows)


def at(*scales):
    """The probes at these scales of one direction."""
    return [KeyedProbe((KEY,), scale) for scale in scales]


def drawn(noise, key, parameter_id, start, count, device="cpu"):
    """z of the elements [start, start + count), as an update of zeros shows it."""
    values = torch.zeros(count, device=device)
    noise.update([target(values, parameter_id, start)], [Update(key, -1.0)], "stochastic")
    return values


def result(backend_of, case, device="cpu"):
    """All tensors that an operation of `backend_of(law)` returns or writes."""
    operation, distribution, dtype, other = case
    run = perturbed if operation == "perturb" else updated
    return run(backend_of(DenseLaw(distribution)), dtype, other, device)


def perturbed(noise, dtype, out_dtype, device):
    values = [values_of_every_size(math.prod(shape)).view(shape) for shape in SHAPES]
    thetas = [each.to(device, dtype) for each in values]
    # Vectors have copies in fp32, as in models.
    weights = [
        weight(theta, place, torch.float32 if place % 3 == 1 else out_dtype)
        for place, theta in enumerate(thetas)
    ]
    of_rows = [
        weight(thetas[place], place, out_dtype, torch.tensor(rows, device=device))
        for place, rows in ((0, [3, 0, 3]), (5, [1, 4]), (6, [8]))
    ]
    copies = []
    for probes in (at(*scales) for scales in SCALES):
        copies += perturb(noise, weights, probes)
        copies += [perturb(noise, [some_rows], probes)[0] for some_rows in of_rows]
    return list(itertools.chain(*copies))


def perturb(noise, weights, probes):
    """The copies of each weight at any probes."""
    groups = [noise.perturb(weights, some) for some in with_opposites(probes)]
    return [list(itertools.chain(*of_weight)) for of_weight in zip(*groups, strict=True)]


def updated(noise, dtype, precision, device):
    targets = []
    for parameter_id, (count, start) in enumerate(TARGETS):
        values, low = stored(values_of_every_size(count), dtype, precision, device)
        targets.append(target(values, parameter_id, start, low))
    noise.update(targets, UPDATES, precision)
    return [tensor for each in targets for tensor in (each.values, each.low) if tensor is not None]


def bits(tensor):
    """The bit patterns, with one for all NaN: the backends may differ in the payload of a NaN."""
    if not tensor.is_floating_point():
        return tensor.cpu()
    patterns = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    return patterns.where(~tensor.isnan(), -1).cpu()


def assert_same_bits(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    different = int((bits(actual) != bits(expected)).sum())
    assert different == 0, f"{different} of {actual.numel()} elements differ"


def digest(tensors):
    """One digest of the bits of all tensors."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(bits(tensor).contiguous().numpy().tobytes())
    return hashed.hexdigest()[:16]
