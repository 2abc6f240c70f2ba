"""The Triton kernels without a GPU: in Triton's interpreter, and what they compile to."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eager_noise import box_muller
from noise_cases import at, target, weight
from packaging.version import Version
from thorough import thorough

from lezo_ds.errors import UserError
from lezo_ds.forward.dense import DenseDirections
from lezo_ds.noise import kernels_of
from lezo_ds.zo.laws import DenseLaw
from lezo_ds.zo.updates import Update

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lezo_ds.noise import gpu
from lezo_ds.noise import triton_kernels as kernels
from lezo_ds.noise.philox import PER_BLOCK

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
compiles = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter does not compile")
on_triton = () if IS_INTERPRETED else pytest.mark.gpu
STORAGE = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16, "u8": tl.uint8}
LOW_TYPES = {"fp32_master": tl.int16, "codes": tl.bfloat16}
TYPES = {"table_ptr": "*i64", "rows_ptr": "*i64", "out_ptr": "*u8", "updates_ptr": "*u64"}
TYPES |= {"key": "u64", "scale": "fp32", "num_updates": "i32", "distance": "i64"}


@compiles
@pytest.mark.parametrize(
    ("selection", "num_tests"),
    [
        ("transposed or vectors_of_some or draws_have or nan_of_any or (codes and bf16)", 12),
        thorough("triton", 30),
    ],
)
def test_the_triton_backend_passes_its_tests_in_the_interpreter(selection, num_tests):
    # In a process of its own: Triton reads the variable when the kernels are defined.
    # Without conftest.py, which imports what only tests of runs need.
    here = Path(__file__)
    files = [str(here.with_name(name)) for name in ("test_noise.py", "test_parts.py", here.name)]
    own = ["--noconftest", "-p", "noise_cases"]
    places = [here.parents[2], here.parents[1] / "helpers", here.parent]
    command = [sys.executable, "-m", "pytest", *own, *files, "-q"]
    command += ["-k", f"triton and ({selection})"]
    path = os.pathsep.join(map(str, places))
    variables = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    result = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= num_tests


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


@pytest.mark.parametrize("words", ["all radii", "quadrants"])
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=on_triton)])
def test_box_muller_of_chosen_words_has_the_bits_of_the_reference(words, backend):
    if not (IS_INTERPRETED or torch.cuda.is_available()):
        pytest.skip("no GPU")
    if words == "all radii":
        # Of a word, 23 bits decide about the radius. An angle of 0 gives the radius itself, and 0.
        radii = torch.arange(0, 1 << 23, 32 if IS_INTERPRETED else 1) << 9  # it is slow
        first, second = (radii | (radii * 0x9E3779B9 >> 20) % 512).view(2, -1)
        chosen = torch.stack([first, torch.zeros_like(first), second, torch.zeros_like(first)])
    else:
        bounds = torch.arange(8)[:, None] * (1 << 29) + torch.arange(-2, 3)
        angles = torch.cat([bounds.flatten(), torch.arange(1 << 16) * 0x9E3779B1]) % (1 << 32)
        radii = angles * 0x85EBCA6B % (1 << 32)
        chosen = torch.stack([radii, angles, radii.flip(0), angles.flip(0)])
    device = "cpu" if IS_INTERPRETED else "cuda"
    # The interpreter takes as long for a large tile as for a small one, a compiler does not.
    tile = 1 << 16 if IS_INTERPRETED else 512
    for part in chosen.split(1 << 18, dim=1):
        out = torch.empty(part.shape[1], 4, device=device)
        grid = (triton.cdiv(part.shape[1], tile),)
        unsigned = part.to(torch.uint32).to(device)
        box_muller_kernel[grid](unsigned, out, part.shape[1], tile, enable_fp_fusion=False)
        assert torch.equal(out.cpu().view(torch.int32), box_muller(*part).view(torch.int32))


def compiled_for_hopper(kernel, types, constants, aligned=()):
    """Compile for compute capability 9.0; some arguments are multiples of 16 bytes."""
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i64") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target, options = GPUTarget("cuda", 90, 32), {"enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options).asm


def assert_rounds_every_operation(ptx, num_normals, num_fused=0):
    """None are fused, but two of a logarithm or root, one of a cosine, and `num_fused` others."""
    num_fused += num_normals // 4 * 2 * (2 + 2 + 1)
    assert len(re.findall(r"\bfma\.rn\.f32\b", ptx)) == num_fused
    approximate = set(re.findall(r"\S*\.(?:approx|ftz)\S*", ptx))
    assert approximate == ({"rsqrt.approx.ftz.f32"} if num_normals else set())


def dense(storage, distribution, operation):
    """A kernel of dense directions: "perturb", "rectangle", "rows" or the storage of an update."""
    is_update = operation in ("fp32", "stochastic", "fp32_master", "codes")
    kernel = kernels.update_kernel if is_update else kernels.perturb_kernel
    dtype = STORAGE[storage]
    constants = {"dtype": dtype, "out_dtype": dtype, "storage": operation, "two_signs": True}
    constants |= {"low_dtype": LOW_TYPES.get(operation, dtype), "unit": 16, "num_columns": 16}
    constants |= {"distribution": distribution, "per_block": PER_BLOCK[distribution]}
    constants["num_blocks"] = gpu.BLOCKS_OF_TILE[distribution]
    constants["layout"] = "aligned rows" if operation == "rectangle" else "aligned"
    if operation != "rows":
        constants["rows_ptr"] = None
    pointers = [name for name in TYPES if name.endswith("_ptr") and name not in constants]
    aligned = [name for name in (*pointers, "distance") if name in kernel.arg_names]
    return compiled_for_hopper(kernel, TYPES, constants, aligned)


# And the most instructions of an element. Perturbed 16-bit weights have a second store, for copies
# in fp32.
COMPILED = [
    ("fp32", "normal", "perturb", 54),
    ("bf16", "normal", "perturb", 59),
    ("bf16", "normal", "rows", 59),
    ("bf16", "normal", "rectangle", 74),  # of tensor parallelism, with accesses as wide
    ("fp32", "normal", "fp32", 55),
    ("bf16", "normal", "stochastic", 70),
    ("bf16", "normal", "fp32_master", 64),
    ("fp16", "normal", "fp32_master", 73),
    ("u8", "normal", "codes", 120),
    ("bf16", "rademacher", "perturb", 21),
    ("fp16", "rademacher", "fp32_master", 33),
]


@compiles
@pytest.mark.parametrize(("storage", "distribution", "operation", "most"), COMPILED)
def test_gpu_code_is_short_and_fuses_nothing(storage, distribution, operation, most, tmp_path):
    if Version(triton.__version__) < Version("3.7"):
        pytest.skip("older compilers write longer code")
    compiled = dense(storage, distribution, operation)
    num_elements = gpu.BLOCKS_OF_TILE[distribution] * PER_BLOCK[distribution] // 128
    has_low_bits = storage == "fp16" and operation == "fp32_master"  # read and written
    num_normals = num_elements if distribution == "normal" else 0
    num_fused = 2 * num_elements if has_low_bits else 0
    assert_rounds_every_operation(compiled["ptx"], num_normals, num_fused)
    if operation in ("perturb", "rectangle"):
        assert ".global.v2." in compiled["ptx"] or ".global.v4." in compiled["ptx"]
        assert ".global.b16" not in compiled["ptx"]
    if storage == "bf16" and operation in ("perturb", "rows"):
        assert "cvt.rn.bf16" in compiled["ptx"]  # rounded to nearest by the hardware
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled["cubin"])
    command = [triton.knobs.nvidia.nvdisasm.path, "--print-code", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?!NOP)([^;]+);", listing)
    assert most - 10 < len(instructions) / num_elements <= most


@compiles
@pytest.mark.parametrize("storage", ["fp32", "stochastic", "fp32_master", "codes"])
def test_kernels_of_low_rank_compile_and_round_every_operation_on_its_own(storage):
    values = {"fp32": "fp32", "codes": "u8"}.get(storage, "bf16")
    low_type = "*bf16" if storage == "codes" else "*i16"
    subtraction = {"rows_ptr": "*fp32", "columns_ptr": "*fp32", "low_ptr": low_type, "key": "u64"}
    subtraction |= {"values_ptr": f"*{values}", "factor": "fp32"}
    subtraction |= dict.fromkeys(("num_terms", "tiles_of_row", "parameter_width"), "i32")
    subtraction["first_column"] = "i32"
    constants = {"storage": storage, "layout": "aligned", "unit": 16}
    constants |= {"wraps_once": True, "num_blocks": 512}
    entries = {"out_ptr": "*fp32", "keys_ptr": "*u64", "rank": "i32"}
    of_entries = {"distribution": "normal", "per_block": 4, "num_blocks": 256}
    subtracted = compiled_for_hopper(kernels.subtract_kernel, subtraction, constants)
    assert_rounds_every_operation(subtracted["ptx"], 0)
    drawn = compiled_for_hopper(kernels.entries_kernel, entries, of_entries)
    assert_rounds_every_operation(drawn["ptx"], 1024 // 128)


@compiles
def test_alike_parameters_take_one_launch_and_others_one_for_each_kind(monkeypatch):
    launched = []
    monkeypatch.setattr(gpu.Launch, "run", lambda launch, *_: launched.append(launch.kernel))
    matrix, vector, odd = (torch.zeros(shape).bfloat16() for shape in ((16, 16), (16,), (3,)))
    alike = [weight(matrix, 1), weight(vector, 2, torch.float32)]
    others = [weight(odd, 3, torch.float32), weight(torch.zeros(16), 4)]
    kernels_on_cpu = gpu.TritonKernels(torch.device("cpu"))
    noise = DenseDirections(DenseLaw(), kernels_of=lambda _: kernels_on_cpu)
    for num_others in (0, 1, 2):
        weights = alike + others[:num_others]
        targets = [target(each.theta.view(-1), each.elements.parameter_id) for each in weights]
        for _ in range(2):
            noise.perturb(weights, at(0.1, -0.1))
            noise.update(targets, [Update(5, 0.1)], "stochastic")
        first, second = launched[: len(launched) // 2], launched[len(launched) // 2 :]
        assert len(first) == 2 * (1 + num_others)
        # Kernels are used again.
        assert all(a.constants is b.constants for a, b in zip(first, second, strict=True))
        launched.clear()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler"),
        subprocess.CalledProcessError(1, "gcc"),
        PermissionError(13, "Permission denied", "/root"),
    ],
)
def test_a_gpu_on_which_triton_cannot_start_is_refused_with_the_cause(error, monkeypatch):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(gpu, "TritonKernels", fails)
    with pytest.raises(UserError, match=f"cannot run on this GPU: {type(error).__name__}: .*gcc"):
        kernels_of(torch.device("cuda"))


def test_a_build_of_pytorch_for_amd_gpus_is_refused_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    with pytest.raises(UserError, match=r"for AMD GPUs \(ROCm 6\.4\.43482\)") as refusal:
        kernels_of(torch.device("cuda"))
    assert "compiler" not in str(refusal.value)
