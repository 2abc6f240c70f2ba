"""Box-Muller of chosen words in Triton: all radii, and the angles at which quadrants meet.

Needs a CUDA device or Triton's interpreter; test_noise_triton.py runs it in the interpreter.
"""

from __future__ import annotations

import os

import pytest
import torch
from lezo_ds.noise.gaussian import box_muller

pytest.importorskip("triton")

import triton
import triton.language as tl

from lezo_ds.noise import triton_kernels as kernels

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="no GPU; test_noise_triton.py runs it in the interpreter",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 1 << 16


@triton.jit
def box_muller_kernel(words_ptr, out_ptr, count, tile: tl.constexpr):
    """Four normals of each block; words_ptr is uint32 [4, count]."""
    block = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = block < count
    word0 = tl.load(words_ptr + block, mask=inside)
    word1 = tl.load(words_ptr + count + block, mask=inside)
    word2 = tl.load(words_ptr + 2 * count + block, mask=inside)
    word3 = tl.load(words_ptr + 3 * count + block, mask=inside)
    out = out_ptr + block[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out, kernels.box_muller(word0, word1, word2, word3), mask=inside[:, None])


def assert_triton_gives_the_reference(words):
    """`words`: int64 [4, n], the unsigned words of n blocks."""
    count = words.shape[1]
    out = torch.empty(count, 4, device=DEVICE)
    grid = (triton.cdiv(count, TILE),)
    unsigned = words.to(torch.uint32).to(DEVICE)
    box_muller_kernel[grid](unsigned, out, count, TILE, enable_fp_fusion=False)
    assert torch.equal(out.cpu().view(torch.int32), box_muller(*words).view(torch.int32))


def test_triton_gives_every_radius():
    # Of a word, 23 bits decide about the radius. An angle of 0 gives the radius itself, and 0.
    radii = torch.arange(1 << 23) << 9
    noisy = radii | (radii * 0x9E3779B9 >> 20) % 512
    for some in noisy.view(16, 2, -1):
        zero = torch.zeros_like(some[0])
        assert_triton_gives_the_reference(torch.stack([some[0], zero, some[1], zero]))


def test_triton_gives_every_quadrant_and_its_signs_of_zero():
    bounds = torch.arange(8)[:, None] * (1 << 29) + torch.arange(-2, 3)
    generator = torch.Generator().manual_seed(0)
    others = torch.randint(1 << 32, (1 << 16,), generator=generator)
    angles = torch.cat([bounds.flatten() % (1 << 32), others])
    radii = torch.randint(1 << 32, angles.shape, generator=generator)
    assert_triton_gives_the_reference(torch.stack([radii, angles, radii.flip(0), angles.flip(0)]))
