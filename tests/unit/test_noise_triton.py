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
        [sys.executable, "-m", "pytest", "tests/unit/test_noise_backends.py", "-k", "triton", "-q"],
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
    for assembly in (*others, *updates):
        assert "fma.rn.f32" not in assembly  # a product and a sum that are rounded once
        assert ("sqrt.rn.f32" in assembly) == (distribution == "normal")
        assert ".approx" not in assembly
        assert ".ftz" not in assembly  # denormals flushed to zero
    if storage == "bf16":
        assert "cvt.rn.bf16" in updates[0]  # rounded to nearest by the hardware


@needs_a_compiler
@pytest.mark.parametrize(
    ("kernel", "precision", "most"),
    [
        (kernels.perturb_kernel, None, 21),  # with those that vectors need: their copies are fp32
        (kernels.update_kernel, kernels.NEAREST, 15),
    ],
)
@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp16"])
def test_signs_take_few_instructions_an_element(kernel, storage, precision, most, tmp_path):
    precision = None if precision is None else precision.value
    compiled = compiled_for_hopper(kernel, storage, "rademacher", precision, wide=True)
    found = instructions(compiled["cubin"], tmp_path)
    tile = TILES["rademacher"]
    elements_of_thread = tile.num_blocks * tile.per_block / (32 * NUM_WARPS)
    assert 1 < len(found) / elements_of_thread <= most


@needs_a_compiler
def test_alike_parameters_take_one_launch_and_others_one_for_each_kind(monkeypatch):
    def count(kernel, *_, **arguments):
        launched.append((kernel, arguments["unit"]))

    monkeypatch.setattr(gpu, "_launch", count)
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
