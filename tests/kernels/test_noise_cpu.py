"""How the C++ kernels are built and called, and what must not change their bits."""

import platform
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from eager_noise import EagerNoise
from noise_cases import CASES, GOLDEN, at, digest, drawn, result, target, weight

from lezo_ds.errors import UserError
from lezo_ds.forward.dense import DenseDirections
from lezo_ds.noise import cpu, kernels_of
from lezo_ds.noise.cpu import CpuKernels
from lezo_ds.noise.low_bits import split_master
from lezo_ds.zo.laws import DenseLaw
from lezo_ds.zo.updates import Update


@pytest.fixture
def first_use(monkeypatch, tmp_path):
    """An empty cache of libraries and of kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernels_of.cache_clear()
    yield
    kernels_of.cache_clear()


@pytest.mark.usefixtures("first_use")
@pytest.mark.parametrize("reason", ["built without g++", "cannot compile this", "Not a directory"])
def test_where_kernels_cannot_be_built_one_line_says_what_to_install(reason, tmp_path, monkeypatch):
    fix = "apt-get install g\\+\\+, or conda install gxx"
    if reason == "Not a directory":
        (tmp_path / "cache").write_text("a file")
        fix = "set XDG_CACHE_HOME to "
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    if reason == "cannot compile this":
        (tmp_path / "g++").write_text("#!/bin/sh\necho cannot compile this >&2\nexit 1\n")
        (tmp_path / "g++").chmod(0o755)
    with pytest.raises(UserError, match=f"{re.escape(reason)}(.|\n)*; fix: .*{fix}"):
        kernels_of(torch.device("cpu"))


@pytest.mark.thorough
@pytest.mark.usefixtures("first_use")
def test_ranks_that_build_at_once_share_one_library_and_reuse_it(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(cpu, "FLAGS", [flag.replace("-O3", "-O0") for flag in cpu.FLAGS])
    with ThreadPoolExecutor(2) as ranks:
        libraries = list(ranks.map(lambda _: cpu._built_library(), range(2)))
    assert caplog.text.count("compiling") == 2
    assert cpu._built_library() == libraries[0] == libraries[1]
    assert caplog.text.count("compiling") == 2
    assert list((tmp_path / "cache" / "lezo_ds").iterdir()) == [libraries[0]]
    built, plain = DenseDirections(DenseLaw()), EagerNoise(DenseLaw())
    assert torch.equal(drawn(built, 1, 2, 3, 999), drawn(plain, 1, 2, 3, 999))


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize("instruction_set", ["x86-64", "x86-64-v3"])
def test_older_instruction_sets_give_the_same_bits(monkeypatch, tmp_path, instruction_set):
    if instruction_set == "x86-64-v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    flags = [flag.replace("native", instruction_set) for flag in cpu.FLAGS]
    monkeypatch.setattr(cpu, "FLAGS", flags)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, case in CASES.items():
        assert digest(result(DenseDirections, case)) == GOLDEN["results"][name]


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
    for num_threads in (1, 2, 3):
        noise = DenseDirections(DenseLaw(distribution))
        torch.set_num_threads(num_threads)
        shard = theta.clone()
        noise.update([target(shard, 2, 5)], [Update(1, 0.1)], "stochastic")
        ((full,),) = noise.perturb([weight(theta, 2)], at(0.1))
        ((some,),) = noise.perturb([weight(table, 2, rows=rows)], at(0.1))
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
        noise = DenseDirections(DenseLaw())
        ((copy,),) = noise.perturb([weight(theta, 2)], at(tiny))
        noise.update([target(high, 2, low=low)], [Update(1, tiny)], "fp32_master")
        torch.set_flush_denormal(False)
        assert len(copy.unique()) > 90
        digests.add(digest([copy, high, low]))
    assert len(digests) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_are_those_of_pytorch(dtype):
    def converted(values, out_dtype):
        # `DenseDirections.perturb` converts with PyTorch if the scale is 0.
        return CpuKernels().perturb("normal", [weight(values, 0, out_dtype)], 0, 0.0, 1)[0][0]

    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator)
    all_stored = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    ties = all_stored.float().view(torch.int32) + 0x1000
    values = torch.cat([patterns.to(torch.int32), ties]).view(torch.float32)
    for source, out_dtype in ((values, dtype), (all_stored, torch.float32)):
        actual, expected = converted(source, out_dtype), source.to(out_dtype)
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual[~actual.isnan()], expected[~expected.isnan()])


def test_a_row_out_of_range_is_refused():
    for row in (-1, 3):
        table = weight(torch.zeros(3, 4), 2, rows=torch.tensor([0, row]))
        with pytest.raises(ValueError, match="rows must lie in"):
            DenseDirections(DenseLaw()).perturb([table], at(0.1))
