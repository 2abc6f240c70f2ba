"""The noise operations for CPUs: C++ that is compiled once per machine and called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lezo_ds.noise.backend import OneByOneNoise, Shard, pack_updates
from lezo_ds.zo.distributions import Distribution
from lezo_ds.zo.precision import UpdatePrecision
from lezo_ds.zo.updates import Update

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
# -ffp-contract=off: a fused multiply-add rounds once where the other backends round twice.
# -fno-trapping-math: lets GCC turn selections into SIMD code; unlike -ffast-math it changes no result.
FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-shared", "-fPIC", "-pthread"]

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DISTRIBUTIONS: dict[Distribution, int] = {"normal": 0, "rademacher": 1}
_PRECISIONS: dict[UpdatePrecision, int] = {"nearest": 0, "stochastic": 1, "fp32_master": 2}


class BuildError(Exception):
    """The C++ kernels cannot be built or loaded here."""


class CpuNoise(OneByOneNoise):
    """`NoiseBackend` on the CPU, on `torch.get_num_threads()` threads; their number changes no bit.

    Raises:
        BuildError: there is no C++ compiler, or it failed.

    """

    def __init__(self) -> None:
        self._kernels = load_kernels()

    def _draw(
        self,
        distribution: Distribution,
        key: int,
        parameter_id: int,
        start: int,
        count: int,
        device: torch.device,
    ) -> Tensor:
        if device.type != "cpu":
            raise _wrong_device(device)
        out = torch.empty(count, dtype=torch.float32)
        self._kernels.lezo_draw(
            _DISTRIBUTIONS[distribution],
            out.data_ptr(),
            start,
            count,
            key,
            parameter_id,
            torch.get_num_threads(),
        )
        return out

    def _perturb(
        self,
        distribution: Distribution,
        theta: Tensor,
        rows: Tensor | None,
        key: int,
        parameter_id: int,
        scale: float,
        outs: Sequence[Tensor],
    ) -> None:
        if not theta.is_cpu:
            raise _wrong_device(theta.device)
        num_rows, width = 1, theta.numel()
        if rows is not None:
            num_rows, width = len(rows), theta.shape[1]
            if num_rows and not (int(rows.min()) >= 0 and int(rows.max()) < len(theta)):
                raise ValueError(f"rows must lie in [0, {len(theta)})")
        self._kernels.lezo_perturb(
            _DISTRIBUTIONS[distribution],
            theta.data_ptr(),
            _FORMATS[theta.dtype],
            outs[0].data_ptr(),
            outs[1].data_ptr() if len(outs) > 1 else None,
            _FORMATS[outs[0].dtype],
            None if rows is None else rows.data_ptr(),
            num_rows,
            width,
            key,
            parameter_id,
            scale,
            torch.get_num_threads(),
        )

    def _update_all(
        self,
        distribution: Distribution,
        shards: Sequence[Shard],
        steps: Sequence[Update],
        precision: UpdatePrecision,
    ) -> None:
        updates = pack_updates(steps)
        address, num_threads = updates.ctypes.data, torch.get_num_threads()
        for values, start, parameter_id, low in shards:
            if not values.is_cpu:
                raise _wrong_device(values.device)
            self._kernels.lezo_update(
                _DISTRIBUTIONS[distribution],
                values.data_ptr(),
                _FORMATS[values.dtype],
                None if low is None else low.data_ptr(),
                _PRECISIONS[precision],
                start,
                values.numel(),
                parameter_id,
                address,
                len(updates),
                num_threads,
            )


@functools.cache
def load_kernels() -> ctypes.CDLL:
    """Return the kernels; compile them first if the user's cache lacks them for this machine.

    Raises:
        BuildError: there is no C++ compiler, or it failed.

    """
    try:
        kernels = ctypes.CDLL(str(_built_library()))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        raise BuildError(str(error)) from error
    ptr, i32, i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    u32, u64, f32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float
    # In the order of the C functions' parameters at the end of cpu_kernels.cpp.
    signatures = {
        "lezo_draw": [i32, ptr, i64, i64, u64, u32, i32],
        "lezo_perturb": [i32, ptr, i32, ptr, ptr, i32, ptr, i64, i64, u64, u32, f32, i32],
        "lezo_update": [i32, ptr, i32, ptr, i32, i64, i64, u32, ptr, i64, i32],
    }
    for name, arguments in signatures.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, None
    return kernels


def _built_library() -> Path:
    """Return the path of the shared library in the user's cache; build it first if it is missing."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or c++) on the PATH")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    identity = "\0".join([SOURCE.read_text(), *FLAGS, version, _processor()])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lezo_ds"
    library = cache / f"noise-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _compile(compiler, library)
    return library


def _compile(compiler: str, library: Path) -> None:
    logger.info("compiling the noise kernels with %s (a few seconds, once): %s", compiler, library)
    # Several ranks may build at once, so each builds in its own folder; the last rename wins.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed: {result.stderr.strip()[-2000:]}")
        output.replace(library)


def _processor() -> str:
    """Return the processor's model and instruction sets, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _wrong_device(device: torch.device) -> ValueError:
    return ValueError(f"CpuNoise works on CPU tensors, got {device}")
