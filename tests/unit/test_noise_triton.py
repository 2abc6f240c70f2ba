"""The Triton kernels without a GPU: their suite in Triton's interpreter, and what they compile to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import environment

from lezo_ds.errors import UserError
from lezo_ds.noise import noise_backend

pytest.importorskip("triton")

from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.gpu import TritonNoise

REPOSITORY = Path(__file__).parents[2]
TYPES = {
    "out_ptr": "*fp32",
    "minus_ptr": "*fp32",
    "rows_ptr": "*i64",
    "low_ptr": "*i16",
    "keys_ptr": "*u64",
    "multipliers_ptr": "*fp32",
    "key": "u64",
    "parameter_id": "u32",
    "scale": "fp32",
    "num_steps": "i32",
    "start": "i64",
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


def ptx_for_hopper(kernel, storage, precision=None):
    """The assembly that `kernel` becomes for compute capability 9.0; needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = TYPES | dict.fromkeys(("theta_ptr", "shard_ptr", "plus_ptr"), f"*{storage}")
    constants = {"aligned": False, "num_blocks": 256, "precision": precision}
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    return compiled.asm["ptx"]


needs_a_compiler = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile"
)


@needs_a_compiler
@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp16"])
def test_the_kernels_compile_for_a_gpu_with_every_operation_rounded_on_its_own(storage):
    precisions = [kernels.NEAREST, kernels.STOCHASTIC, kernels.MASTER]
    updates = [
        ptx_for_hopper(kernels.update_kernel, storage, precision.value)
        for precision in precisions[: 1 if storage == "fp32" else 3]
    ]
    perturb = ptx_for_hopper(kernels.perturb_kernel, storage)
    for assembly in (ptx_for_hopper(kernels.normal_kernel, storage), perturb, *updates):
        assert "fma.rn.f32" not in assembly  # a product and a sum that are rounded once
        assert "sqrt.rn.f32" in assembly
        assert ".approx" not in assembly
        assert ".ftz" not in assembly  # denormals flushed to zero
    if storage == "bf16":
        assert "cvt.rn.bf16" in updates[0]  # rounded to nearest by the hardware


def test_a_gpu_on_which_triton_cannot_build_is_refused_before_weights_load(monkeypatch):
    def fails(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(TritonNoise, "_normal", fails)
    with pytest.raises(UserError, match=r"Triton cannot run .* got: RuntimeError: Failed to find C compiler"):
        noise_backend(torch.device("cuda"))
