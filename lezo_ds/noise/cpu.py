"""The noise operations for CPUs: C++ that is compiled once per machine and called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, get_num_threads

from lezo_ds.noise.backend import NoiseBackend, Shard, Weight, pack_updates
from lezo_ds.zo.updates import Distribution, Update, UpdatePrecision

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
# -ffp-contract=off: a fused multiply-add rounds once where the other backends round twice.
# -fno-trapping-math: lets GCC turn selections into SIMD code; unlike -ffast-math it changes no result.
FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-shared", "-fPIC", "-pthread"]

# In the order of the enumerations and of the C functions' parameters in cpu_kernels.cpp.
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)
_DISTRIBUTIONS = get_args(Distribution)
_PRECISIONS = get_args(UpdatePrecision)
_PTR, _I32, _I64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_U32, _U64, _F32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float
_SIGNATURES = {
    "lezo_draw": [_I32, _PTR, _I64, _I64, _U64, _U32, _I32],
    "lezo_perturb": [_I32, _PTR, _I32, _PTR, _PTR, _I32, _PTR, _I64, _I64, _U64, _U32, _F32, _I32],
    "lezo_update": [_I32, _PTR, _I32, _PTR, _I32, _I64, _I64, _U32, _PTR, _I64, _I32],
}


class BuildError(Exception):
    """The C++ kernels cannot be built or loaded here."""


class CpuNoise(NoiseBackend):
    """`NoiseBackend` on the CPU, on `torch.get_num_threads()` threads; their number changes no bit.

    Raises:
        BuildError: there is no C++ compiler, or it failed.

    """

    def __init__(self) -> None:
        try:
            self._kernels = ctypes.CDLL(str(_built_library()))
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
            raise BuildError(str(error)) from error
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._kernels, name)
            function.argtypes, function.restype = arguments, None

    def draw(
        self,
        key: int,
        parameter_id: int,
        start: int,
        count: int,
        device: torch.device,
        distribution: Distribution = "normal",
    ) -> Tensor:
        out = torch.empty(count, dtype=torch.float32)
        code = _DISTRIBUTIONS.index(distribution)
        self._kernels.lezo_draw(code, out.data_ptr(), start, count, key, parameter_id, get_num_threads())
        return out

    def _perturb(
        self, weights: Sequence[Weight], key: int, scale: float, num_signs: int, distribution: Distribution
    ) -> list[list[Tensor]]:
        copies = []
        for theta, parameter_id, out_dtype, rows in weights:
            num_rows, width, shape = 1, theta.numel(), theta.shape
            if rows is not None:
                num_rows, width = shape = torch.Size((len(rows), theta.shape[1]))
                if num_rows and not (int(rows.min()) >= 0 and int(rows.max()) < len(theta)):
                    raise ValueError(f"rows must lie in [0, {len(theta)})")
            outs = [torch.empty(shape, dtype=out_dtype) for _ in range(num_signs)]
            self._kernels.lezo_perturb(
                _DISTRIBUTIONS.index(distribution),
                theta.data_ptr(),
                _FORMATS.index(theta.dtype),
                outs[0].data_ptr(),
                outs[1].data_ptr() if num_signs == 2 else None,
                _FORMATS.index(out_dtype),
                None if rows is None else rows.data_ptr(),
                num_rows,
                width,
                key,
                parameter_id,
                scale,
                get_num_threads(),
            )
            copies.append(outs)
        return copies

    def update_(
        self,
        shards: Sequence[Shard],
        updates: Sequence[Update],
        precision: UpdatePrecision,
        distribution: Distribution = "normal",
    ) -> None:
        packed = pack_updates(updates)
        for values, start, parameter_id, low in shards:
            self._kernels.lezo_update(
                _DISTRIBUTIONS.index(distribution),
                values.data_ptr(),
                _FORMATS.index(values.dtype),
                None if low is None else low.data_ptr(),
                _PRECISIONS.index(precision),
                start,
                values.numel(),
                parameter_id,
                packed.ctypes.data,
                len(packed),
                get_num_threads(),
            )


def _built_library() -> Path:
    """Return the path of the shared library in the user's cache; build it first if it is missing."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or c++) on the PATH")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    identity = "\0".join([SOURCE.read_text(), *FLAGS, version, _processor()])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lezo_ds"
    library = cache / f"noise-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    cache.mkdir(parents=True, exist_ok=True)
    logger.info("compiling the noise kernels with %s (a few seconds, once): %s", compiler, library)
    # Several ranks may build at once, so each builds in its own folder; the last rename wins.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        output = Path(folder) / library.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed: {result.stderr.strip()[-2000:]}")
        output.replace(library)
    return library


def _processor() -> str:
    """Return the processor's model and instruction sets, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
