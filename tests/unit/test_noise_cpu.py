import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from lezo_ds.noise import Distribution, Update, cpu, split_master
from lezo_ds.noise.cpu import CpuNoise
from lezo_ds.noise.eager import EagerNoise

CPU = torch.device("cpu")
REPOSITORY = Path(__file__).parents[2]
PRINT_BACKEND_AND_NOISE = """
import logging, torch
logging.basicConfig(level=logging.INFO)
from lezo_ds.noise import noise_backend
for _ in range(2):
    noise = noise_backend(torch.device("cpu"))
print(type(noise).__name__, noise.draw(1, 2, 3, 4, torch.device("cpu")).tolist())
"""


def start_python(cache, path=None):
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(REPOSITORY)}
    if path is not None:
        environment["PATH"] = path
    return subprocess.Popen(
        [sys.executable, "-c", PRINT_BACKEND_AND_NOISE],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def expected_line(backend):
    return f"{backend} {EagerNoise().draw(1, 2, 3, 4, CPU).tolist()}"


def broken_compiler(folder):
    compiler = folder / "g++"
    compiler.write_text("#!/bin/sh\necho cannot compile this >&2\nexit 1\n")
    compiler.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("compiler", ["none", "broken"])
def test_without_a_working_compiler_pytorch_gives_the_same_noise_and_one_warning(tmp_path, compiler):
    path = "" if compiler == "none" else broken_compiler(tmp_path)
    output, errors = start_python(tmp_path / "cache", path).communicate()
    assert output.strip() == expected_line("EagerNoise")
    assert errors.count("install a C++ compiler") == 1
    assert ("no C++ compiler" if compiler == "none" else "cannot compile this") in errors


def test_ranks_that_build_at_once_share_one_library_that_is_then_reused(tmp_path):
    ranks = [start_python(tmp_path) for _ in range(2)]
    for rank in ranks:
        output, errors = rank.communicate()
        assert output.strip() == expected_line("CpuNoise"), errors
    built = list((tmp_path / "lezo_ds").iterdir())
    assert [path.suffix for path in built] == [".so"]
    output, errors = start_python(tmp_path).communicate()
    assert output.strip() == expected_line("CpuNoise")
    assert "compiling" not in errors


def test_a_cache_that_cannot_be_written_falls_back_to_pytorch(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    output, _ = start_python(blocked).communicate()
    assert output.strip() == expected_line("EagerNoise")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize("instruction_set", ["x86-64", "x86-64-v3"])
def test_older_instruction_sets_give_the_same_bits(monkeypatch, tmp_path, instruction_set):
    if instruction_set == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    flags = [flag.replace("native", instruction_set) for flag in cpu.FLAGS]
    monkeypatch.setattr(cpu, "FLAGS", flags)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.load_kernels.cache_clear()
    older = CpuNoise()
    cpu.load_kernels.cache_clear()
    assert len(list((tmp_path / "lezo_ds").iterdir())) == 1
    start, count = 2**34 - 1001, 5003
    for distribution in get_args(Distribution):
        where = (1, 2, start, count, CPU, distribution)
        assert torch.equal(older.draw(*where), EagerNoise().draw(*where))
        for dtype in (torch.bfloat16, torch.float16):
            shard = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
            expected = shard.clone()
            for noise, values in ((older, shard), (EagerNoise(), expected)):
                noise.update_(values, start, 2, [Update(1, 0.01)], "stochastic", distribution=distribution)
            assert torch.equal(shard, expected)


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("distribution", get_args(Distribution))
def test_the_number_of_threads_changes_no_bit(distribution):
    noise = CpuNoise()
    count = 200_003
    theta = torch.randn(count, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = torch.arange(199, -1, -1)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        shard = theta.clone()
        drawn = {"distribution": distribution}
        noise.update_(shard, 5, 2, [Update(1, 0.1)], "stochastic", **drawn)
        by_rows = noise.perturb_rows(theta[:200_000].view(200, 1000), rows, 1, 2, [0.1], **drawn)
        perturbed = noise.perturb(theta, 1, 2, [0.1], **drawn)
        results.append((noise.draw(1, 2, 3, count, CPU, **drawn), shard, *perturbed, *by_rows))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert torch.equal(results[0][0], EagerNoise().draw(1, 2, 3, count, CPU, distribution))


@pytest.fixture
def restore_denormals():
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("restore_denormals")
def test_flushing_of_denormals_elsewhere_in_the_process_changes_no_bit():
    tiny = 1.5e-38  # normal itself, but its product with most z is not
    results = []
    for flush in (False, True):
        theta = torch.full((100,), 2e-38)
        high, low = split_master(theta, torch.bfloat16)
        torch.set_flush_denormal(flush)
        (perturbed,) = CpuNoise().perturb(theta, 1, 2, [tiny])
        CpuNoise().update_(high, 0, 2, [Update(1, tiny)], "fp32_master", low)
        results.append((perturbed.view(torch.int32), high.view(torch.int16), low))
        torch.set_flush_denormal(False)
    assert len(results[0][0].unique()) > 90
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def converted_by_the_kernel(values, dtype):
    """The public `perturb` converts with PyTorch if the scale is 0."""
    out = torch.empty(len(values), dtype=dtype)
    CpuNoise()._perturb("normal", values, None, 0, 0, 0.0, [out])
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_nearest_is_that_of_pytorch(dtype):
    patterns = torch.randint(-(2**31), 2**31, (1_000_000,), generator=torch.Generator().manual_seed(0))
    ties = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float().view(torch.int32) + 0x1000
    values = torch.cat([patterns.to(torch.int32), ties]).view(torch.float32)
    rounded = converted_by_the_kernel(values, dtype)
    expected = values.to(dtype)
    assert torch.equal(rounded.isnan(), expected.isnan())
    assert torch.equal(rounded[~rounded.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_read_as_pytorch_reads_it(dtype):
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    read = converted_by_the_kernel(values, torch.float32)
    assert torch.equal(read.isnan(), values.isnan())
    assert torch.equal(read[~read.isnan()], values[~values.isnan()].float())


def test_a_row_out_of_range_is_refused():
    for row in (-1, 3):
        with pytest.raises(ValueError, match="rows must lie in"):
            CpuNoise().perturb_rows(torch.zeros(3, 4), torch.tensor([0, row]), 1, 2, [0.1])
