import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import environment

pytest.importorskip("triton")

REPOSITORY = Path(__file__).parents[1]
SCALARS = {
    "seed": "u64",
    "parameter_id": "u32",
    "scale": "fp32",
    "coefficient": "fp32",
    "num_steps": "i32",
    "start": "i64",
    "count": "i64",
    "width": "i64",
    "tiles_per_row": "i32",
    "rows_ptr": "*i64",
    "seeds_ptr": "*u64",
    "coefficients_ptr": "*fp32",
    "low_ptr": "*i16",
}


def run_python(arguments, **more):
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(**more),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="these files run on the device itself")
@pytest.mark.parametrize(
    "suite", [["tests/test_noise_backends.py", "-k", "triton"], ["tests/test_noise_fast.py"]]
)
def test_the_triton_backend_passes_its_suites_in_the_interpreter(suite):
    # A process of its own: Triton reads the variable when the kernels are defined.
    result = run_python(["-m", "pytest", *suite, "-q", "-p", "no:cacheprovider"], TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-5000:]
    assert "passed" in result.stdout


def ptx_for_hopper(kernel, storage, precision=None, fast=False):
    """The assembly that `kernel` becomes for compute capability 9.0; needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {
        "theta_ptr": storage,
        "shard_ptr": storage,
        "plus_ptr": storage,
        "minus_ptr": "fp32",
        "out_ptr": "fp32",
        "sums_ptr": "i64",
    }
    types = SCALARS | {name: f"*{kind}" for name, kind in pointers.items()}
    constants = {"aligned": False, "num_blocks": 256, "precision": precision, "fast": fast}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    chosen = {
        (kernel.arg_names.index(name),): value
        for name, value in constants.items()
        if name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=chosen)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
    return compiled.asm["ptx"]


def assemblies(storage, fast):
    """All kernels' assemblies: those without an update, and those with one."""
    from lezo_ds.noise import triton_kernels as kernels

    precisions = (0,) if storage == "fp32" else (0, 1, 2)
    return (
        ptx_for_hopper(kernels.normal_kernel, storage, fast=fast),
        ptx_for_hopper(kernels.perturb_kernel, storage, fast=fast),
        *(
            ptx_for_hopper(kernel, storage, precision, fast)
            for kernel in (kernels.update_kernel, kernels.update_many_kernel)
            for precision in precisions
        ),
    )


needs_a_compiler = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile"
)


@needs_a_compiler
@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp16"])
def test_the_exact_kernels_compile_for_a_gpu_with_every_operation_rounded_on_its_own(storage):
    for assembly in assemblies(storage, fast=False):
        assert "fma.rn.f32" not in assembly  # a product and a sum rounded once
        assert "sqrt.rn.f32" in assembly
        assert ".approx" not in assembly
        assert ".ftz" not in assembly  # denormals flushed to zero


@needs_a_compiler
@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp16"])
def test_the_fast_kernels_compile_to_the_approximate_instructions(storage):
    normal, *others = assemblies(storage, fast=True)
    for assembly in (normal, *others):
        for instruction in ("lg2", "sqrt", "sin", "cos"):
            # 256 blocks and 128 threads: 2 blocks a thread, each with two of what Box-Muller needs.
            assert assembly.count(f"{instruction}.approx.ftz.f32") == 4
        assert "sqrt.rn" not in assembly
    assert "fma.rn.f32" not in normal  # z has the same bits wherever it is drawn
    assert all("fma.rn.f32" in assembly for assembly in others)


@needs_a_compiler
def test_bf16_is_rounded_to_nearest_by_the_hardware():
    from lezo_ds.noise import triton_kernels as kernels

    assembly = ptx_for_hopper(kernels.update_kernel, "bf16", precision=0)
    assert "cvt.rn.bf16" in assembly
