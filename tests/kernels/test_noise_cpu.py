"""How the C++ kernels are built, and what must not change their bits: threads, processors, libraries."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from noise_cases import CASES, KEY, digest, result

from lezo_ds.noise import Shard, Weight, cpu
from lezo_ds.noise.cpu import CpuNoise
from lezo_ds.noise.reference import EagerNoise, split_master
from lezo_ds.zo.updates import Update

CPU = torch.device("cpu")
PRINT_BACKEND_AND_NOISE = """
import logging, torch
logging.basicConfig(level=logging.INFO)
from lezo_ds.noise import noise_backend
for _ in range(2):
    noise = noise_backend(torch.device("cpu"))
print(type(noise).__name__, noise.draw(1, 2, 3, 4, torch.device("cpu")).tolist())
"""


def start_python(cache, **variables):
    return subprocess.Popen(
        [sys.executable, "-c", PRINT_BACKEND_AND_NOISE],
        env=os.environ
        | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(Path(__file__).parents[2])}
        | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def expected_line(backend):
    return f"{backend} {EagerNoise().draw(1, 2, 3, 4, CPU).tolist()}"


def test_where_the_kernels_cannot_be_built_pytorch_gives_the_same_noise_and_one_warning(tmp_path):
    compiler, blocked = tmp_path / "g++", tmp_path / "file"
    compiler.write_text("#!/bin/sh\necho cannot compile this >&2\nexit 1\n")
    compiler.chmod(0o755)
    blocked.write_text("not a folder")
    runs = {
        "no C++ compiler": start_python(tmp_path / "cache", PATH=""),
        "cannot compile this": start_python(tmp_path / "cache", PATH=str(tmp_path)),
        "Not a directory": start_python(blocked),
    }
    for reason, process in runs.items():
        output, errors = process.communicate()
        assert output.strip() == expected_line("EagerNoise"), errors
        assert errors.count("install a C++ compiler") == errors.count(reason) == 1


def test_ranks_that_build_at_once_share_one_library_that_is_then_reused(tmp_path):
    for rank in [start_python(tmp_path) for _ in range(2)]:
        output, errors = rank.communicate()
        assert output.strip() == expected_line("CpuNoise"), errors
    output, errors = start_python(tmp_path).communicate()
    assert output.strip() == expected_line("CpuNoise")
    assert "compiling" not in errors
    assert [path.suffix for path in (tmp_path / "lezo_ds").iterdir()] == [".so"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize("instruction_set", ["x86-64", "x86-64-v3"])
def test_older_instruction_sets_give_the_same_bits(monkeypatch, tmp_path, instruction_set):
    if instruction_set == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr(cpu, "FLAGS", [flag.replace("native", instruction_set) for flag in cpu.FLAGS])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    older = CpuNoise()
    assert len(list((tmp_path / "lezo_ds").iterdir())) == 1
    for case in CASES.values():
        assert digest(result(older, case)) == digest(result(CpuNoise(), case))


@pytest.fixture
def restore_settings():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("restore_settings")
@pytest.mark.parametrize("distribution", ["normal", "rademacher"])
def test_the_number_of_threads_changes_no_bit(distribution):
    theta = torch.randn(200_003, generator=torch.Generator().manual_seed(0)).bfloat16()
    table, rows = theta[:200_000].view(200, 1000), torch.arange(199, -1, -1)
    digests = set()
    for noise, num_threads in ((CpuNoise(), 1), (CpuNoise(), 2), (CpuNoise(), 3), (EagerNoise(), 1)):
        torch.set_num_threads(num_threads)
        shard = theta.clone()
        noise.update_([Shard(shard, 5, 2)], [Update(1, 0.1)], "stochastic", distribution)
        ((full,),) = noise.perturb([Weight(theta, 2, theta.dtype)], KEY, [0.1], distribution)
        ((some,),) = noise.perturb([Weight(table, 2, theta.dtype, rows)], KEY, [0.1], distribution)
        digests.add(digest([shard, full, some]))
    assert len(digests) == 1


@pytest.mark.usefixtures("restore_settings")
def test_flushing_of_denormals_elsewhere_in_the_process_changes_no_bit():
    tiny = 1.5e-38  # normal itself, but its product with most z is not
    digests = set()
    for flush in (False, True):
        theta = torch.full((100,), 2e-38)
        high, low = split_master(theta, torch.bfloat16)
        torch.set_flush_denormal(flush)
        ((copy,),) = CpuNoise().perturb([Weight(theta, 2, theta.dtype)], KEY, [tiny])
        CpuNoise().update_([Shard(high, 0, 2, low)], [Update(1, tiny)], "fp32_master")
        torch.set_flush_denormal(False)
        assert len(copy.unique()) > 90
        digests.add(digest([copy, high, low]))
    assert len(digests) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_are_those_of_pytorch(dtype):
    def converted(values, out_dtype):
        # The public `perturb` converts with PyTorch if the scale is 0.
        return CpuNoise()._perturb([Weight(values, 0, out_dtype)], 0, 0.0, 1, "normal")[0][0]

    patterns = torch.randint(-(2**31), 2**31, (1_000_000,), generator=torch.Generator().manual_seed(0))
    all_stored = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    ties = all_stored.float().view(torch.int32) + 0x1000
    values = torch.cat([patterns.to(torch.int32), ties]).view(torch.float32)
    for source, out_dtype in ((values, dtype), (all_stored, torch.float32)):
        actual, expected = converted(source, out_dtype), source.to(out_dtype)
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual[~actual.isnan()], expected[~expected.isnan()])


def test_a_row_out_of_range_is_refused():
    for row in (-1, 3):
        weight = Weight(torch.zeros(3, 4), 2, torch.float32, torch.tensor([0, row]))
        with pytest.raises(ValueError, match="rows must lie in"):
            CpuNoise().perturb([weight], KEY, [0.1])
