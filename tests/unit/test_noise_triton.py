"""The Triton kernels without a GPU: their suite in Triton's interpreter, and what they compile to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from commands import environment

from lezo_ds.errors import UserError
from lezo_ds.noise import Distribution, Shard, Update, Whole, noise_backend

pytest.importorskip("triton")

import triton.language as tl

from lezo_ds.noise import gpu
from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.gpu import NUM_WARPS, TILES, TritonNoise

REPOSITORY = Path(__file__).parents[2]
INTERPRETED = (
    "tests/unit/test_noise_backends.py",
    "tests/unit/test_noise_box_muller.py",
    "tests/kernels/test_perturbed_norm.py",
)
TYPES = {
    "out_ptr": "*fp32",
    "rows_ptr": "*i64",
    "keys_ptr": "*u64",
    "multipliers_ptr": "*fp32",
    "key": "u64",
    "parameter_id": "u32",
    "scale": "fp32",
    "num_steps": "i32",
    "low_ptr": "*i16",
    "start": "i64",
    "table_ptr": "*i64",
    "distance": "i64",
    "count": "i64",
    "width": "i64",
    "tiles_per_row": "i32",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the suite runs on the device itself")
def test_the_triton_backend_passes_the_suite_in_the_interpreter():
    # In a process of its own: Triton reads the variable when the kernels are defined.
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *INTERPRETED, "-k", "triton", "-q"],
        env=environment(TRITON_INTERPRET="1"),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:]
    assert "passed" in result.stdout


def compiled_for_hopper(kernel, storage, distribution, precision=None, *, wide=False):
    """What `kernel` becomes for compute capability 9.0; needs no GPU.

    `wide`: of tensors as nearly all are, which begin and end at multiples of 16 bytes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = TYPES | dict.fromkeys(("theta_ptr", "plus_ptr", "minus_ptr", "shard_ptr"), f"*{storage}")
    if kernel is kernels.perturb_kernel:
        types["out_ptr"] = "*u8"
    dtype = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}[storage]
    constants = {
        "aligned": wide,
        "unit": 16 if wide else 1,
        "precision": precision,
        **TILES[distribution]._asdict(),
    }
    constants |= {"two_signs": True, "num_columns": 16, "out_dtype": dtype}
    constants["distribution"] = {"normal": kernels.NORMAL, "rademacher": kernels.RADEMACHER}[
        distribution
    ].value
    # As a launch finds them: addresses and sizes that are multiples of 16, which allow wide accesses.
    sixteen = [name for name in names if name.endswith("_ptr") or name in ("distance", "start", "count")]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in sixteen if wide and name in types},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm


def instructions(cubin, tmp_path):
    """The instructions of a compiled kernel, without the padding after its end."""
    import triton

    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin)
    command = [triton.knobs.nvidia.nvdisasm.path, "--print-code", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);", listing)
    return [instruction for instruction in found if not instruction.startswith("NOP")]


def elements_of_thread(distribution):
    tile = TILES[distribution]
    return tile.num_blocks * tile.per_block // (32 * NUM_WARPS)


needs_a_compiler = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile"
)


@needs_a_compiler
@pytest.mark.parametrize("distribution", get_args(Distribution))
@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp16"])
def test_the_kernels_compile_for_a_gpu_with_every_operation_rounded_on_its_own(storage, distribution):
    precisions = [kernels.NEAREST, kernels.STOCHASTIC, kernels.MASTER]
    updates = [
        compiled_for_hopper(kernels.update_kernel, storage, distribution, precision.value)["ptx"]
        for precision in precisions[: 1 if storage == "fp32" else 3]
    ]
    others = [
        compiled_for_hopper(kernel, storage, distribution)["ptx"]
        for kernel in (kernels.draw_kernel, kernels.perturb_kernel, kernels.perturb_rows_kernel)
    ]
    num_blocks = TILES[distribution].num_blocks // (32 * NUM_WARPS)
    for assembly in (*others, *updates):
        # In four normals: two of each logarithm, two of each root, one of each cosine. No other is fused.
        fused = num_blocks * 2 * (2 + 2 + 1) if distribution == "normal" else 0
        if storage == "fp16" and assembly is updates[-1]:
            fused += 2 * elements_of_thread(distribution)  # low bits are read and written
        assert len(re.findall(r"\bfma\.rn\.f32\b", assembly)) == fused
        approximate = re.findall(r"\S*\.(?:approx|ftz)\S*", assembly)
        assert set(approximate) == ({"rsqrt.approx.ftz.f32"} if distribution == "normal" else set())
    if storage == "bf16":
        assert "cvt.rn.bf16" in updates[0]  # rounded to nearest by the hardware


MOST_INSTRUCTIONS = {
    # Of a pair of perturbed weights, of an update, and of an update with low bits.
    "normal": (53, 55, {"bf16": 61, "fp16": 70}),
    "rademacher": (15, 15, {"bf16": 20, "fp16": 29}),
}
OTHER_STORE = 5
"""Instructions of a 16-bit kernel that perturbs, for copies in fp32. A program runs one of its two stores."""


@needs_a_compiler
@pytest.mark.parametrize("distribution", MOST_INSTRUCTIONS)
@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp16"])
def test_an_element_takes_few_instructions(storage, distribution, tmp_path):
    pair, nearest, low_bits = MOST_INSTRUCTIONS[distribution]
    pair += OTHER_STORE if storage != "fp32" else 0
    cases = [(kernels.perturb_kernel, None, pair), (kernels.update_kernel, kernels.NEAREST.value, nearest)]
    if storage in low_bits:
        cases.append((kernels.update_kernel, kernels.MASTER.value, low_bits[storage]))
    for kernel, precision, most in cases:
        compiled = compiled_for_hopper(kernel, storage, distribution, precision, wide=True)
        number = len(instructions(compiled["cubin"], tmp_path)) / elements_of_thread(distribution)
        print(f"{kernel.__name__}, precision {precision}, {storage}, {distribution}: {number:.1f}")
        assert most - 10 < number <= most


@needs_a_compiler
def test_alike_parameters_take_one_launch_and_others_one_for_each_kind(monkeypatch):
    class Counted(gpu.Launch):
        def __init__(self, kernel, num_programs, constants, num_warps):
            self.counted = kernel, constants["unit"]

        def run(self, *_):
            launched.append(self.counted)

    monkeypatch.setattr(gpu, "Launch", Counted)
    matrix, vector = torch.zeros(16, 16).bfloat16(), torch.zeros(16).bfloat16()
    wholes = [Whole(matrix, 1, torch.bfloat16), Whole(vector, 2, torch.float32)]
    odd, wide = Whole(torch.zeros(3).bfloat16(), 3, torch.float32), Whole(torch.zeros(16), 4, torch.float32)
    for others, units in (([], [16]), ([odd], [16, 1]), ([odd, wide], [16, 1, 16])):
        launched = []
        TritonNoise().perturb_all([*wholes, *others], 5, [0.1, -0.1])
        assert launched == [(kernels.perturb_kernel, unit) for unit in units]
        launched = []
        shards = [Shard(theta.view(-1), 0, number) for theta, number, _ in (*wholes, *others)]
        TritonNoise().update_all_(shards, [Update(5, 0.1)], "stochastic")
        assert launched == [(kernels.update_kernel, unit) for unit in units]


def test_a_gpu_on_which_triton_cannot_build_is_refused_before_weights_load(monkeypatch):
    def fails(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(TritonNoise, "_draw", fails)
    with pytest.raises(UserError, match=r"Triton cannot run .* got: RuntimeError: Failed to find C compiler"):
        noise_backend(torch.device("cuda"))
